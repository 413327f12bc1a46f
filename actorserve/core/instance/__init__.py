"""The state machine of one instance: the life of each request on it, and what its engine does next."""
