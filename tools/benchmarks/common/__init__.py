"""Shared by several benchmarks: arguments, prompts, journals, and asking and watching processes."""
