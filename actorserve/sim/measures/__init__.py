"""Measures of a run in bounded memory."""
