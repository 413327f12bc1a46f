"""Real clients against our server, unchanged: their environments, their checks, and a table of what holds."""
