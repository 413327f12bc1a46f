"""The requests of a simulated or measured run: when they arrive, and how long they are."""
