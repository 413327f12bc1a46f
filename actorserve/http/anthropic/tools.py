"""The tools of a message: functions of the client. Tools that Anthropic's servers or models define are refused."""

from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, model_validator

from actorserve.http.answers.answer_format import Json
from actorserve.http.openai.chat.tools import Tool, parse_tools as parse_functions
from actorserve.http.requests.strict import Ignored, StrictFields, null_is, wrong

_MAX_SHOWN_CHARS = 64


def parse_tools(value: object, info: ValidationInfo) -> tuple[Tool, ...]:
    """Raises: PydanticCustomError that names the first wrong tool."""
    if value is None:
        return ()
    if not isinstance(value, list):
        raise wrong("must be a list of tools")
    return parse_functions([_function(tool, index) for index, tool in enumerate(value)], info)


def _function(tool: Any, index: int) -> Json:
    """The tool with the field names of a chat's functions."""
    match tool:
        case {"type": str(kind)} if kind != "custom":
            raise wrong(
                f"tool {index}: the type {kind[:_MAX_SHOWN_CHARS]!r} is not supported; only the client's own tools are"
            )
        case {"name": name, "input_schema": dict(schema)}:
            known = {field: tool[field] for field in ("description", "strict") if field in tool}
            return {"name": name, "parameters": schema, **known}
        case _:
            raise wrong(f"tool {index}: must have a name and an input_schema")


class ToolChoice(StrictFields):
    """Which tools the model may or must call."""

    type: Literal["auto", "any", "tool", "none"]
    name: Annotated[str, Field(max_length=256)] | None = None
    disable_parallel_tool_use: Annotated[bool, null_is(False)] = False
    cache_control: Ignored = None

    @model_validator(mode="after")
    def _has_name(self) -> "ToolChoice":
        if (self.type == "tool") != (self.name is not None):
            raise wrong("name: needed for the type tool, and only for it")
        return self

    def for_chat(self) -> str | Json:
        """The choice as the field of a chat."""
        match self.type:
            case "any":
                return "required"
            case "tool":
                return {"type": "function", "function": {"name": self.name}}
            case word:
                return word
