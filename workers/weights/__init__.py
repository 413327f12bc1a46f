"""A model's weights: read from its files, checked, brought into the engine's form, and kept for the next start."""
