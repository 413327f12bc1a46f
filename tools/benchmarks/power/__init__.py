"""What power caps cost and gain."""
