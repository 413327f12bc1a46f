"""Measured figures as JSON files, and the README tables that are generated from them."""
