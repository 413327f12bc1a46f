"""What the document says about one method of one route."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel

from actorserve.http.openapi.answers import Error


@dataclass(frozen=True, slots=True)
class Example:
    """A request that works as it stands on a server that serves a chat model, and the status of its answer."""

    body: Mapping[str, Any] | None = None
    path: Mapping[str, str] = field(default_factory=dict)
    status: int = 200


@dataclass(frozen=True, slots=True)
class Operation:
    """One method of one route. ``path`` is the route's.

    ``requests`` are the models that the body may have; none: there is no body. ``answers`` are the models of bodies by
    status; None: plain text. ``event`` is the model of the data of a stream's events. ``errors`` are the statuses of
    errors beside those of every route, and ``error`` is the model of their bodies.
    ``examples`` have names.
    """

    method: str
    path: str
    summary: str
    answers: Mapping[int, type[BaseModel] | None]
    requests: tuple[type[BaseModel], ...] = ()
    event: type[BaseModel] | None = None
    errors: tuple[int, ...] = ()
    error: type[BaseModel] = Error
    examples: Mapping[str, Example] = field(default_factory=lambda: {"plain": Example()})
