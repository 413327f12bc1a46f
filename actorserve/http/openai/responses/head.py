"""The fields of a response that tell what was asked for."""

from actorserve.http.answers.answer_format import Json
from actorserve.http.openai.responses.requests import ResponsesRequest


def response_head(request: ResponsesRequest, response_id: str, model: str, created_s: int) -> Json:
    """The fields of the response object that do not change while it is generated. ``created_s`` is Unix time."""
    text, reasoning = request.text, request.reasoning
    return {
        "id": response_id,
        "object": "response",
        "created_at": created_s,
        "model": model,
        "instructions": request.instructions,
        "metadata": request.metadata,
        "tools": request.tools.shown,
        "tool_choice": request.tool_choice.shown,
        "parallel_tool_calls": request.parallel_tool_calls,
        "text": {"format": text.format} if text is not None else {"format": {"type": "text"}},
        "reasoning": {"effort": reasoning.effort if reasoning is not None else None, "summary": None},
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_logprobs": request.top_logprobs,
        "max_output_tokens": request.max_output_tokens,
        "max_tool_calls": None,
        "presence_penalty": request.presence_penalty,
        "frequency_penalty": request.frequency_penalty,
        "previous_response_id": None,
        "conversation": None,
        "prompt": None,
        "background": False,
        "store": False,
        "truncation": "disabled",
        "service_tier": "default",
        "safety_identifier": None,
        "prompt_cache_key": None,
        "user": request.user,
    }
