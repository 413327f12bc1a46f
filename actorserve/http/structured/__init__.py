"""Structured output: from a client's schema, regular expression, choices or Lark text to a checked grammar."""
