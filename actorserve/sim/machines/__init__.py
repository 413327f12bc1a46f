"""The machines of a simulated cluster."""
