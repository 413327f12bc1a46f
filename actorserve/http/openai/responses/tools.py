"""The tools of a response: functions, also in namespaces. All other types would have to run here, so they are refused.

A namespace is a group of functions, such as those of one MCP server. The model sees its functions with the namespace
before their names, and the client gets both names back. A web search that must not reach the web
(``"external_web_access": false``) can find nothing here, so such a tool is left out: Codex offers one in every request.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationInfo

from actorserve.http.answers.answer_format import Json
from actorserve.http.openai.chat.tools import NamedTool, Tool, ToolChoice, parse_tool_choice, parse_tools
from actorserve.http.requests.strict import wrong

_MAX_SHOWN_CHARS = 64


@dataclass(frozen=True, slots=True)
class OfferedTools:
    """What the model may call. ``shown`` are the tools as the client gave them, without those that were left out.

    ``in_namespaces`` has the namespace and the name of each function of a namespace, by the name that the model sees.
    """

    functions: tuple[Tool, ...] = ()
    shown: tuple[Json, ...] = ()
    in_namespaces: Mapping[str, tuple[str, str]] | None = None

    def names(self, function: str) -> Json:
        """The fields that name a called function to the client."""
        known = (self.in_namespaces or {}).get(function)
        return {"name": function} if known is None else {"name": known[1], "namespace": known[0]}


def name_in_prompt(namespace: str, name: str) -> str:
    """The name that the model sees for a function of a namespace."""
    return f"{namespace}{name}" if namespace.endswith("_") else f"{namespace}__{name}"


def parse_offered_tools(value: object, info: ValidationInfo) -> OfferedTools:
    """Raises: PydanticCustomError that names the first wrong tool."""
    if value is None:
        return OfferedTools()
    if not isinstance(value, list):
        raise wrong("must be a list of tools")
    shown: list[Json] = []
    functions: list[Json] = []
    in_namespaces: dict[str, tuple[str, str]] = {}
    for index, tool in enumerate(value):
        if _finds_nothing(tool):
            continue
        for namespace, function in _functions(tool, index):
            if namespace:
                name = name_in_prompt(namespace, function["name"])
                in_namespaces[name] = (namespace, function["name"])
                function = {**function, "name": name}
            functions.append(function)
        shown.append(tool)
    return OfferedTools(parse_tools(functions, info), tuple(shown), in_namespaces)


def _finds_nothing(tool: object) -> bool:
    return (
        isinstance(tool, dict)
        and tool.get("type") in ("web_search", "web_search_preview")
        and tool.get("external_web_access") is False
    )


def _functions(tool: Any, index: int) -> Iterator[tuple[str, Json]]:
    """The functions of one tool, each with its namespace, which may be empty."""
    match tool:
        case {"type": "function"}:
            yield "", tool
        case {"type": "namespace", "name": str(namespace), "tools": list(members)} if namespace:
            for member in members:
                match member:
                    case {"type": "function", "name": str()}:
                        yield namespace, member
                    case _:
                        raise wrong(f"tool {index}: a namespace may only hold functions")
        case {"type": str(kind)}:
            raise wrong(f"tool {index}: the type {_shown(kind)} is not supported; only functions are")
        case _:
            raise wrong(f'tool {index}: must be {{"type": "function", "name": ...}}')


@dataclass(frozen=True, slots=True)
class Choice:
    """Which tools the model may or must call. ``only`` are the names of the allowed functions; None: all of them.

    ``shown`` is the choice as the client gave it.
    """

    tool_choice: ToolChoice = "auto"
    only: frozenset[str] | None = None
    shown: Any = "auto"

    def allowed(self, functions: Sequence[Tool]) -> list[Tool]:
        return [tool for tool in functions if self.only is None or tool.name in self.only]


def parse_choice(value: Any) -> Choice:
    """A word, or an object: a function, or the allowed functions. Raises: PydanticCustomError."""
    match value:
        case None:
            return Choice()
        case {"type": "allowed_tools", "mode": "auto" | "required" as mode, "tools": list(tools)}:
            return Choice(mode, frozenset(_allowed_name(tool) for tool in tools), value)
        case {"type": "function", "name": str(name), "namespace": str(namespace)} if namespace:
            return Choice(NamedTool(name_in_prompt(namespace, name)), None, value)
        case {"type": str(kind)} if kind != "function":
            raise wrong(f"the type {_shown(kind)} is not supported; only function and allowed_tools are")
        case _:
            return Choice(parse_tool_choice(value), None, value)


def _allowed_name(tool: object) -> str:
    match tool:
        case {"type": "function", "name": str(name)}:
            return name
        case _:
            raise wrong('its tools must be {"type": "function", "name": ...}')


def _shown(kind: str) -> str:
    return repr(kind[:_MAX_SHOWN_CHARS])
