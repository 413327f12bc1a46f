"""Measuring a running server from outside, as its clients see it."""
