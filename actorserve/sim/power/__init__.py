"""The power of simulated machines, and its caps."""
