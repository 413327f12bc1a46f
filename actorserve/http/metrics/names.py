"""The names of counts that other parts of the server read or write, too (``http.host_counts``)."""

from typing import Final

KEY_REQUESTS: Final = "actorserve_key_requests"
KEY_PROMPT_TOKENS: Final = "actorserve_key_prompt_tokens"
KEY_GENERATION_TOKENS: Final = "actorserve_key_generation_tokens"
RESTARTS: Final = "actorserve_restarts"
"""Counted by the host's supervisor, by the name of the process."""
