"""``/v1/responses``: OpenAI's Responses API, without a memory of earlier responses."""
