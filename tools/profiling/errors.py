"""Errors that end a measurement."""


class ProfilingError(Exception):
    """Ends a measurement. The text is one line that a person can act on."""


class NoCapsError(ProfilingError):
    """Power caps cannot be set here, so what they cost cannot be measured."""
