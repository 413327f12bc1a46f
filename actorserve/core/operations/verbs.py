"""The verbs of an operator, in one table: the console, the checks of the core and the documentation follow it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from enum import StrEnum
from typing import Final

from actorserve.core.messages import Command, InstanceRole

CALLER_PREFIX: Final = "console:"
"""The names of consoles, as the cores know them, begin with it. No process of the cluster has such a name."""
MAX_ARGUMENT_CHARS: Final = 256
LOG_LEVELS: Final = ("debug", "info", "warning", "error")
ROLES: Final = tuple([role.value for role in InstanceRole])


class OperatorRole(StrEnum):
    """What a caller may do: a viewer reads, and an operator acts as well."""

    VIEWER = "viewer"
    OPERATOR = "operator"


class Kind(StrEnum):
    """What an argument is. It decides how the argument is checked, and what a console completes it with."""

    WORKER = "worker"
    TARGET = "worker or host"
    REQUEST = "request"
    NUMBER = "number"
    COUNT = "number from 0"
    SIZE = "number or auto"
    LEVEL = "log level: debug, info, warning or error"
    ROLE = "role: mixed, prompt or token"
    SETTING = "setting"
    VALUE = "value"
    PROCESS = "process"


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of a verb. Optional ones come last."""

    name: str
    kind: Kind
    is_optional: bool = False


@dataclass(frozen=True, slots=True)
class Verb:
    """``acts``: it changes something, so that only operators may use it, and it is audited. ``destroys``: a console
    asks before it sends it.
    """

    name: str
    help: str
    parameters: tuple[Parameter, ...] = ()
    acts: bool = False
    destroys: bool = False


_WORKER: Final = Parameter("WORKER", Kind.WORKER)
_TARGET: Final = Parameter("WORKER|HOST", Kind.TARGET)
_REQUEST: Final = Parameter("REQUEST", Kind.REQUEST)

VERBS: Final[Mapping[str, Verb]] = {
    verb.name: verb
    for verb in (
        Verb("status", "the cluster in a few lines"),
        Verb("workers", "the workers, their load and their state", (Parameter("WORKER|HOST", Kind.TARGET, True),)),
        Verb("requests", "the requests that are open, and where they run", (Parameter("WORKER", Kind.WORKER, True),)),
        Verb("cordon", "send no more requests to a worker, or to a host's workers", (_TARGET,), acts=True),
        Verb("uncordon", "send requests there again", (_TARGET,), acts=True),
        Verb("drain", "cordon, and move all requests away", (_TARGET,), acts=True),
        Verb(
            "role",
            "which phases a worker computes: mixed, prompt or token",
            (_WORKER, Parameter("ROLE", Kind.ROLE)),
            acts=True,
        ),
        Verb("migrate", "move a running request to a worker", (_REQUEST, _WORKER), acts=True),
        Verb("cancel", "end a request with an error", (_REQUEST,), acts=True, destroys=True),
        Verb("restart", "empty a worker, end it and start it again", (_WORKER,), acts=True, destroys=True),
        Verb("show", "the whole way of a request, with times", (_REQUEST,)),
        Verb("events", "what happened in the cluster", (Parameter("SINCE", Kind.COUNT, True),)),
        Verb("top", "the workers live: freeness, queues, KV, moves, tokens/s"),
        Verb("audit", "the last acts of operators", (Parameter("LINES", Kind.COUNT, True),)),
        Verb("hosts", "the hosts, and what runs there"),
        Verb("config", "the settings that apply", (Parameter("SETTING", Kind.SETTING, True),)),
        Verb(
            "scale", "run so many workers, or as many as the load needs", (Parameter("N|auto", Kind.SIZE),), acts=True
        ),
        Verb("priority", "change the priority of a request", (_REQUEST, Parameter("N", Kind.NUMBER)), acts=True),
        Verb(
            "set",
            "change a parameter of the coordinator's policies until the whole server restarts",
            (Parameter("SETTING", Kind.SETTING), Parameter("VALUE", Kind.VALUE)),
            acts=True,
        ),
        Verb(
            "log-level",
            "what processes log: debug, info, warning or error",
            (Parameter("LEVEL", Kind.LEVEL), Parameter("PROCESS", Kind.PROCESS, True)),
            acts=True,
        ),
        Verb("cap", "the power caps of devices, and what they draw"),
        Verb(
            "budget",
            "change the power budget of the cluster or of a host until the whole server restarts: watts, or none",
            (Parameter("WATTS|none", Kind.VALUE), Parameter("HOST", Kind.VALUE, True)),
            acts=True,
        ),
        Verb("reload-keys", "read the files of keys again, except in standby coordinators", acts=True),
    )
}


def may(role: OperatorRole, verb: str) -> bool:
    """Whether a caller with this role may use the verb. Everyone may use an unknown one, and learns that it is."""
    known = VERBS.get(verb)
    return role is OperatorRole.OPERATOR or known is None or not known.acts


def problem_of(command: Command) -> str | None:
    """In one line, why this is no correct command; None if it is."""
    verb = VERBS.get(command.verb)
    if verb is None:
        return f"there is no verb {command.verb[:MAX_ARGUMENT_CHARS]!r}{nearest(command.verb, VERBS)}"
    num_needed = sum(not parameter.is_optional for parameter in verb.parameters)
    if not num_needed <= len(command.arguments) <= len(verb.parameters):
        return f"{verb.name} takes {usage(verb) or 'no arguments'}, and got {len(command.arguments)} argument(s)"
    for parameter, text in zip(verb.parameters, command.arguments, strict=False):
        if not _fits(parameter.kind, text):
            return f"{parameter.name} is {text[:MAX_ARGUMENT_CHARS]!r}: expected a {parameter.kind.value}"
    return None


def usage(verb: Verb) -> str:
    """The verb's parameters as a person types them."""
    return " ".join(f"[{parameter.name}]" if parameter.is_optional else parameter.name for parameter in verb.parameters)


def nearest(text: str, known: Mapping[str, object] | Sequence[str]) -> str:
    """`` (did you mean ...?)`` with the nearest of the known words; empty if none is near."""
    found = get_close_matches(text[:MAX_ARGUMENT_CHARS], list(known), 1)
    return f"; did you mean {found[0]}?" if found else ""


def _fits(kind: Kind, text: str) -> bool:
    if not text or len(text) > MAX_ARGUMENT_CHARS:
        return False
    match kind:
        case Kind.NUMBER:
            return _is_integer(text.removeprefix("-"))
        case Kind.COUNT:
            return _is_integer(text)
        case Kind.SIZE:
            return text == "auto" or _is_integer(text)
        case Kind.LEVEL:
            return text in LOG_LEVELS
        case Kind.ROLE:
            return text in ROLES
        case _:
            return True


def _is_integer(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= 9
