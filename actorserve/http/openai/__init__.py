"""OpenAI's endpoints: their requests, and the form of their answers."""
