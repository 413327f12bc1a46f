"""Refuses requests that a web page makes without its user's knowledge: those for another host, or from another origin.

A browser sends some requests of any page to any server, also to one on loopback, and lets the page's own name lead to
another machine (DNS rebinding). But it always says for which name a request is meant (``Host``), and which page made it
(``Origin``). A name that someone else could have chosen is refused; an address in digits could not. Programs that are
no browsers send no ``Origin``.
"""

import ipaddress
import socket
from collections.abc import Collection
from http import HTTPStatus

from starlette.types import ASGIApp, Receive, Scope, Send

from actorserve.http.errors import RequestFailedError, error_response

_ANY = "*"


class AllowedHosts:
    """ASGI middleware: lets requests through that name this machine, or one of ``hosts``, and that come from no page,
    from a page of the same host, or of one of ``origins``. ``*`` allows all.
    """

    def __init__(self, app: ASGIApp, hosts: Collection[str], origins: Collection[str]) -> None:
        self._app = app
        self._is_any_host = _ANY in hosts
        self._is_any_origin = _ANY in origins
        here = socket.gethostname().lower()
        self._hosts = {"localhost", here, here.partition(".")[0], *(host.lower() for host in hosts if host)}
        self._origins = {origin.lower() for origin in origins}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        failure = self._failure(scope) if scope["type"] == "http" else None
        if failure is None:
            await self._app(scope, receive, send)
        else:
            await error_response(failure, scope)(scope, receive, send)

    def _failure(self, scope: Scope) -> RequestFailedError | None:
        hosts = [value for name, value in scope["headers"] if name == b"host"]
        origins = [value for name, value in scope["headers"] if name == b"origin"]
        if hosts and not self._is_any_host and not (len(hosts) == 1 and self._allows_host(hosts[0])):
            message = "the header Host names another server than this one; the setting http.allowed_hosts adds names"
            return RequestFailedError(HTTPStatus.FORBIDDEN, message, code="host_not_allowed")
        if origins and not self._is_any_origin and not (len(origins) == 1 and self._allows_origin(origins[0], hosts)):
            message = "pages of this origin may not call this server; the setting http.cors_origins adds origins"
            return RequestFailedError(HTTPStatus.FORBIDDEN, message, code="origin_not_allowed")
        return None

    def _allows_host(self, value: bytes) -> bool:
        name = _without_port(value.decode("latin-1").strip().lower())
        return name in self._hosts or name.removesuffix(".") in self._hosts or _is_address(name)

    def _allows_origin(self, value: bytes, hosts: Collection[bytes]) -> bool:
        origin = value.decode("latin-1").strip().lower()
        here = [host.decode("latin-1").strip().lower() for host in hosts]
        return origin in self._origins or any(origin in (f"http://{host}", f"https://{host}") for host in here)


def _without_port(host: str) -> str:
    """The name or address in the header ``Host``; an IPv6 address without its brackets."""
    if host.startswith("["):
        address, bracket, port = host[1:].partition("]")
        return address if bracket and (not port or _is_port(port)) else ""
    name, colon, port = host.partition(":")
    return name if not colon or _is_port(colon + port) else ""


def _is_port(text: str) -> bool:
    return text.startswith(":") and text[1:].isascii() and (text[1:].isdecimal() or text == ":")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
