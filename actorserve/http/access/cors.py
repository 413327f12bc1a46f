"""Lets pages of other origins call the API from a browser."""

from collections.abc import Sequence

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

_METHODS = ("GET", "POST")
_EXPOSED_HEADERS = ("x-request-id", "retry-after")


def with_cors(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """``app`` for pages of these origins (``*``: of any); without origins, ``app`` itself.

    It is outside of the authentication, because a browser sends no key with the request that asks for permission. Keys
    come in headers and not in cookies, so a page can use only keys that it knows. Any header is allowed, because each
    SDK sends headers of its own.
    """
    if not origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=_METHODS,
        allow_headers=("*",),
        allow_private_network=True,
        expose_headers=_EXPOSED_HEADERS,
    )
