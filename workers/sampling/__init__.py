"""From logits to tokens: edits of logits, choosing by counter-based randomness, and log-probabilities."""
