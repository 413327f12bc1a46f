"""Reading a request: its body within limits, and the fields that several endpoints share."""
