"""Measures what iterations and copies take, and makes the profile that the scheduler asks."""
