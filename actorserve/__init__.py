"""An LLM inference server for bare metal: one process per GPU, actors over ZeroMQ, no token lost."""

__version__ = "0.1.0"
