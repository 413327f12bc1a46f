"""The functions that a chat offers to the model, and the client's choice among them."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, model_validator
from typing_extensions import TypedDict  # pydantic needs it before Python 3.12

from actorserve.http.requests.json_values import bounded_object
from actorserve.http.requests.parsing import problems_of
from actorserve.http.requests.strict import Ignored, StrictFields, null_is, parsed_by, wrong

_MAX_TOOLS = 128
"""OpenAI's own limit."""
FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,128}$")]


def _parse_parameters(value: object) -> dict[str, Any] | None:
    return None if value is None else bounded_object(value)


class Tool(StrictFields):
    """A function that the model may call. ``parameters`` is a JSON schema of its arguments; None: no arguments.

    In JSON it is ``{"type": "function", "function": {...}}``, or flat as in ``/v1/responses``.
    """

    type: Literal["function"] = "function"
    name: FunctionName
    description: str | None = None
    parameters: Annotated[dict[str, Any] | None, parsed_by(_parse_parameters, dict[str, Any])] = None
    strict: Annotated[bool, null_is(False)] = False
    cache_control: Ignored = None

    @model_validator(mode="before")
    @classmethod
    def _flat(cls, value: object) -> object:
        if not (isinstance(value, dict) and isinstance(value.get("function"), dict)):
            return value
        return {**{name: item for name, item in value.items() if name != "function"}, **value["function"]}

    def for_template(self) -> dict[str, object]:
        """The tool in the form that chat templates expect, with only those fields that the client gave."""
        function: dict[str, object] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        if self.parameters is not None:
            function["parameters"] = self.parameters
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class NamedTool:
    """The model must call this function."""

    name: str


class FunctionTool(TypedDict):
    """A tool as clients write it in a chat."""

    type: Literal["function"]
    function: Tool


class ChosenFunction(TypedDict):
    name: str


class FunctionChoice(TypedDict):
    """The one function that the model must call, as clients write it in a chat."""

    type: Literal["function"]
    function: ChosenFunction


ToolOfChat = FunctionTool | Tool
ChoiceOfTool = Literal["none", "auto", "required"] | FunctionChoice
ToolChoice = Literal["none", "auto", "required"] | NamedTool


def parse_tools(value: object, info: ValidationInfo) -> tuple[Tool, ...]:
    """Functions with different names, at most 128. Raises: PydanticCustomError."""
    if value is None:
        return ()
    if not isinstance(value, list | tuple):
        raise wrong("must be a list of tools")
    if len(value) > _MAX_TOOLS:
        raise wrong(f"has more than {_MAX_TOOLS} tools")
    tools: dict[str, Tool] = {}
    for index, item in enumerate(value):
        with problems_of(f"tool {index}"):
            tool = Tool.model_validate(item, context=info.context)
        if tool.name in tools:
            raise wrong(f"two tools have the name {tool.name}")
        tools[tool.name] = tool
    return tuple(tools.values())


def parse_tool_choice(value: object) -> ToolChoice:
    """A word, or an object that names a function. Raises: PydanticCustomError."""
    match value:
        case None:
            return "auto"
        case "none" | "auto" | "required" | NamedTool():
            return value
        case {"type": "function", "function": {"name": str(name)}} | {"type": "function", "name": str(name)}:
            return NamedTool(name)
        case _:
            named = '{"type": "function", "function": {"name": ...}}'
            raise wrong(f"must be none, auto, required, or {named}")
