"""API keys, and what precedes every request: authentication and request ids."""
