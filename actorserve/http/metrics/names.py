"""The names of counts that other parts of the server read or write, too (``http.host_counts``)."""

from typing import Final

KEY_REQUESTS: Final = "actorserve_key_requests"
KEY_PROMPT_TOKENS: Final = "actorserve_key_prompt_tokens"
KEY_GENERATION_TOKENS: Final = "actorserve_key_generation_tokens"
TIME_TO_FIRST_TOKEN: Final = "vllm:time_to_first_token_seconds"
INTER_TOKEN_LATENCY: Final = "vllm:inter_token_latency_seconds"
RESTARTS: Final = "actorserve_restarts"
"""Counted by the host's supervisor, by the name of the process."""
