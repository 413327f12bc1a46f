"""What a person did or met that ends a measurement before it starts."""


class BenchError(Exception):
    """Its text is one line that a person can act on."""
