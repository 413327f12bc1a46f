"""``/v1/completions``: its requests, and the form of its answers."""
