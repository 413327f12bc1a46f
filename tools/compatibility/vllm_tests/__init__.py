"""vLLM's own tests of its OpenAI server, run against our server through an adapter."""
