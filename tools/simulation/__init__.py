"""``tools/simulate``: experiments on simulated clusters."""
