"""Renders a model's chat template as transformers would, outside the event loop and within a limit of CPU time.

The template comes with the model and its arguments come from a client, so neither is trusted. Jinja2's sandbox keeps
the template away from Python's internals, and a trace function in the rendering thread stops a rendering that takes too
long.
"""

import asyncio
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from types import FrameType
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from actorserve.errors import InvalidRequestError, ModelError
from actorserve.http.errors import RequestFailedError

_FILE_NAME = "<chat template>"
_MAX_RENDERED_CHARS = 32 * 2**20
_NUM_THREADS = 2
_MAX_SHOWN_CHARS = 200
_PATIENCE_S = 10.0
"""How much longer than its CPU time a rendering may take, because it waits for a thread or a core."""
_RETRY_S = 1.0
# The exceptions of a template's own operations on unexpected arguments.
_TEMPLATE_ERRORS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    ArithmeticError,
    AttributeError,
    RecursionError,
    MemoryError,
)


class ChatTemplate:
    """A compiled template. ``close`` ends its threads."""

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        *,
        timeout_s: float,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        """``special_tokens`` maps ``bos_token`` and the like to text; ``strftime_now`` formats ``now()``.

        ``source`` is kept; ``variables`` are the names that the template reads and does not set.

        Raises: ModelError if ``source`` is not a valid template.
        """
        environment = _environment(now)
        try:
            self.variables = frozenset(meta.find_undeclared_variables(environment.parse(source)))
            code = environment.compile(source, filename=_FILE_NAME)
        except (jinja2.TemplateError, RecursionError, SyntaxError) as error:
            raise ModelError(f"the model's chat template is not valid: {_one_line(error)}") from None
        self.source = source
        self._template = jinja2.Template.from_code(environment, code, environment.globals)
        self._special_tokens = dict(special_tokens)
        self._timeout_s = timeout_s
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="chat-template")

    async def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool = True,
        arguments: Mapping[str, object] | None = None,
    ) -> str:
        """The prompt's text, to be encoded without further special tokens.

        A message's content is text, or a list of text parts (joined by line breaks). ``arguments`` are further
        variables of the template, such as ``tools``; they cannot replace messages and special tokens.

        Raises: InvalidRequestError if the template refuses the messages, fails on them, or takes too long;
        RequestFailedError, 503, if the machine is too busy to render them.
        """
        context = {
            **(arguments or {}),
            **self._special_tokens,
            "messages": [_with_text(message, index) for index, message in enumerate(messages)],
            "add_generation_prompt": add_generation_prompt,
        }
        rendering = asyncio.get_running_loop().run_in_executor(self._threads, self._render, context)
        try:
            # The thread stops itself by its CPU time. This limit bounds the wait for a thread and for a core, which is
            # not the request's fault.
            return await asyncio.wait_for(rendering, self._timeout_s + _PATIENCE_S)
        except TimeoutError:
            message = "the server is too busy to render the chat's messages; try again later"
            raise RequestFailedError(503, message, code="overloaded", retry_after_s=_RETRY_S) from None

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _render(self, context: dict[str, Any]) -> str:
        pieces: list[str] = []
        num_chars = 0
        sys.settrace(_watch(time.thread_time() + self._timeout_s))
        try:
            for piece in self._template.generate(context):
                pieces.append(piece)
                num_chars += len(piece)
                if num_chars > _MAX_RENDERED_CHARS:
                    raise InvalidRequestError("the chat template renders too long a prompt", "messages")
        except _TimeUp:
            raise InvalidRequestError("the chat template takes too long to render these messages", "messages") from None
        except _TEMPLATE_ERRORS as error:
            raise InvalidRequestError(f"the chat template refused: {_one_line(error)}", "messages") from None
        finally:
            sys.settrace(None)
        return "".join(pieces)


class _TimeUp(BaseException):
    """Raised inside a template's code. A BaseException, so that no ``except Exception`` on the way catches it."""


def _watch(last_cpu_s: float) -> Callable[[FrameType, str, Any], Any]:
    """A trace function that raises _TimeUp in the template's own frames once the thread has used this CPU time.

    There is no other way to stop a thread.
    """

    def on_line(frame: FrameType, event: str, argument: object) -> Any:
        if time.thread_time() > last_cpu_s:
            raise _TimeUp
        return on_line

    def on_call(frame: FrameType, event: str, argument: object) -> Any:
        return on_line if frame.f_code.co_filename == _FILE_NAME else None

    return on_call


def _environment(now: Callable[[], datetime]) -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda format: now().strftime(format)
    environment.globals["namespace"] = _Namespace
    return environment


class _GenerationTag(Extension):
    """``{% generation %}`` marks the assistant's text for training. For serving, only its content matters."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Namespace(jinja2.utils.Namespace):
    """Jinja's namespace without names that begin with an underscore, because these reach Python's internals."""

    def __init__(self, /, **attributes: object) -> None:
        for name in attributes:
            _check_name(name)
        super().__init__(**attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: str) -> None:
    if name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace may not hold {name!r}")


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The filter of transformers: jinja's own filter escapes HTML, which would alter a prompt."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _with_text(message: Mapping[str, object], index: int) -> dict[str, object]:
    content = message.get("content")
    if content is None:
        return {**message, "content": ""}
    if isinstance(content, str):
        return dict(message)
    field = f"messages[{index}].content"
    if not isinstance(content, Sequence):
        raise InvalidRequestError(f"{field} must be text or a list of text parts", field)
    texts: list[str] = []
    for part in content:
        text = part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None
        if not isinstance(text, str):
            raise InvalidRequestError(f"{field} may only hold parts of type 'text'", field)
        texts.append(text)
    return {**message, "content": "\n".join(texts)}


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:_MAX_SHOWN_CHARS] or type(error).__name__
