"""Answers: from a request's tokens to text, and from text to the bytes of a response."""
