"""Which functions the model may call in answer to a chat, and which of them it must call."""

from typing import Literal

from actorserve.http.chat.tools.call_form import Functions
from actorserve.http.openai.chat.requests import ChatRequest
from actorserve.http.openai.chat.tools import NamedTool


def callable_functions(request: ChatRequest) -> Functions:
    """The functions whose calls are looked for in the answer. With ``tool_choice: "none"`` the model still sees them,
    as in vLLM, but whatever it writes is text."""
    if request.tool_choice == "none":
        return {}
    return {tool.name: tool.parameters for tool in request.tools if _may_call(request, tool.name)}


def must_call(request: ChatRequest) -> bool:
    """Whether the answer must be a call."""
    return request.tool_choice == "required" or isinstance(request.tool_choice, NamedTool)


def several_calls(request: ChatRequest) -> bool:
    """Whether the answer may have several calls."""
    return request.parallel_tool_calls and not isinstance(request.tool_choice, NamedTool)


def call_finish_reason(request: ChatRequest) -> Literal["tool_calls", "stop"]:
    """Why a choice ends that has called a function; "stop" for a named one, as in OpenAI's API."""
    return "stop" if isinstance(request.tool_choice, NamedTool) else "tool_calls"


def _may_call(request: ChatRequest, name: str) -> bool:
    return not isinstance(request.tool_choice, NamedTool) or request.tool_choice.name == name
