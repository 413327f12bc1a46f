"""Splitwise's pools: which instances compute a request's prompt and its tokens."""
