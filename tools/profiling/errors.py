"""Errors that end a measurement."""


class ProfilingError(Exception):
    """Its text is one line that a person can act on."""
