"""Serving the app with hypercorn, some of whose defaults do not suit this server."""

import asyncio
import errno
import logging
import math
import os
import socket
import ssl
import sys
import traceback
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, cast

import h11
import hypercorn.asyncio
import hypercorn.asyncio.run
import hypercorn.asyncio.tcp_server
import hypercorn.config
import hypercorn.logging
import hypercorn.protocol.h11
from hypercorn.asyncio.tcp_server import TCPServer
from hypercorn.events import Closed, Event, RawData, Updated
from hypercorn.typing import ASGIFramework
from starlette.types import ASGIApp

from actorserve.errors import ActorserveError
from actorserve.http.direct_stream import DirectStream
from actorserve.http.listener import ignore_new_connections

BACKLOG = 4096
KEEP_ALIVE_TIMEOUT_S = 75.0
"""How long a connection may stay open without a request. Clients and proxies keep theirs for a shorter time (5 and
60 s), so they close first, and never send a request on a connection that the server is closing."""
MAX_HEADER_BYTES = 32 * 1024
_READ_BYTES = 256 * 1024
"""Every read of a long body costs the event loop some 0.1 ms, whatever its size. uvloop reads this much at once."""
_ERROR_GRACE_S = 1.0
"""How long after the drain the answers that were cut off may take to send their error."""
_CUT_AFTER_S = 1.0
"""How long after that the connections may take to send their buffers, before they are cancelled."""
_CUT_AGAIN_S = 0.1
_QUICK_BYTES = 16 * 1024
"""A connection with so little in its buffer does not wait: asyncio's limit is higher."""
_ARRIVING_S = 0.1
"""How long connections that clients have begun may take to arrive, before the listener is closed."""
_LAST_REQUEST_S = 0.5
"""How long an open connection may take to bring another request when the server ends. The answer before it may have
begun before the stop, and so did not ask the client to close the connection."""
_CLOSE_TIMEOUT_S = 10.0
"""How long a client may take to read the rest of its last answer, before the connection is aborted."""
_CONNECTION_TASKS = ("worker_serve.<locals>._server_callback", "_handle")  # hypercorn's names
_log = logging.getLogger("actorserve.http")


class AddressError(ActorserveError):
    """The server cannot listen on the configured address."""


def bind(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """A TCP socket that listens, but does not accept yet; port 0 takes any free one.

    Several processes of one user may listen on a ``shared`` port; the kernel spreads the connections among them.

    Raises: AddressError, in one line that names the address.
    """
    try:
        # The first address is enough, because clients connect to a host name's first address.
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (socket.gaierror, UnicodeError):
        raise AddressError(f"{host} is not an address of this machine") from None
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if shared:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(address)
        # Only listen() reports that another process listens on the same address.
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise AddressError(_bind_problem(host, port, error)) from None
    return listener


async def serve(
    app: ASGIApp,
    listener: socket.socket,
    *,
    shutdown: Callable[[], Awaitable[None]],
    drain_timeout_s: float,
    give_up: Callable[[], None],
    tls: ssl.SSLContext | None = None,
    write_timeout_s: float = math.inf,
    lame_duck_s: float = 0.0,
) -> None:
    """Serve ``app`` on ``listener`` (from ``bind``; closed at the end) until ``shutdown()`` returns.

    Then it serves as before for ``lame_duck_s``, except that each answer asks its client to close the connection. Then
    no new connection is accepted, idle ones are closed after a moment, and open answers may go on for
    ``drain_timeout_s``. After that ``give_up()`` must end all answers, and connections that are still open a moment
    later are cancelled. If this call is cancelled, all connections are cancelled.

    With ``tls`` all connections are encrypted. A client that reads nothing of its answer for ``write_timeout_s`` loses
    its connection.
    """
    _adjust_hypercorn()
    config = _Config()
    config.tls = tls
    config.write_timeout_s = write_timeout_s
    descriptor = listener.detach()
    config.bind = [f"fd://{descriptor}"]
    config.backlog = BACKLOG
    config.graceful_timeout = 0.0
    config.keep_alive_timeout = KEEP_ALIVE_TIMEOUT_S
    config.keep_alive_max_requests = 2**31
    config.h11_max_incomplete_size = MAX_HEADER_BYTES
    config.include_server_header = False
    config.accesslog = None
    config.errorlog = _log
    config.logger_class = _OneLineLogger
    giving_up: asyncio.TimerHandle | None = None
    cut: asyncio.TimerHandle | None = None
    loop = asyncio.get_running_loop()

    def cut_connections() -> None:
        # If a client does not read, closing its connection waits forever, at several places. A cancel ends one wait.
        nonlocal cut
        for task in asyncio.all_tasks(loop):
            if getattr(task.get_coro(), "__qualname__", "") in _CONNECTION_TASKS:
                task.cancel()
        cut = loop.call_later(_CUT_AGAIN_S, cut_connections)

    async def shut_down() -> None:
        nonlocal giving_up, cut
        await shutdown()
        config.keep_alive_max_requests = 0  # hypercorn adds `connection: close` to answers
        await asyncio.sleep(lame_duck_s)
        ignore_new_connections(descriptor)
        await asyncio.sleep(_ARRIVING_S)
        config.graceful_timeout = drain_timeout_s + _ERROR_GRACE_S
        giving_up = loop.call_later(drain_timeout_s, give_up)
        cut = loop.call_later(drain_timeout_s + _ERROR_GRACE_S + _CUT_AFTER_S, cut_connections)

    previous_handler = loop.get_exception_handler()
    loop.set_exception_handler(_log_loop_error)
    serving = loop.create_task(hypercorn.asyncio.serve(cast(ASGIFramework, app), config, shutdown_trigger=shut_down))
    try:
        await asyncio.shield(serving)
    except asyncio.CancelledError:
        serving.cancel()
        cut = loop.call_later(_CUT_AFTER_S, cut_connections)
        await asyncio.wait([serving])
        raise
    finally:
        loop.set_exception_handler(previous_handler)
        for timer in (giving_up, cut):
            if timer is not None:
                timer.cancel()


class _Config(hypercorn.config.Config):
    """Hypercorn's settings, and ours. ``tls`` takes the place of the files from which hypercorn would make one."""

    tls: ssl.SSLContext | None = None
    write_timeout_s = math.inf

    @property
    def ssl_enabled(self) -> bool:
        return self.tls is not None

    def create_ssl_context(self) -> ssl.SSLContext | None:
        return self.tls


class _Connection(TCPServer):
    """A connection that ends when its client has gone.

    Hypercorn's own keeps its descriptor for the keep-alive time, or forever: behind a request that came before the
    answer to the last one has ended, it reads nothing, and so does not see that the client is gone. And when it closes,
    it waits for a client that does not read.
    """

    _client_is_gone = False
    _reading: asyncio.Timeout
    config: _Config

    async def _read_data(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(None) as self._reading:
                await super()._read_data()
        self._client_is_gone = True
        await self.idle_task.stop()

    async def write(self, data: bytes) -> None:
        """Write a part of an answer, and wait for a slow client, but not for one that reads nothing."""
        try:
            self.writer.write(data)
            transport = self.writer.transport
            if transport.get_write_buffer_size() <= _QUICK_BYTES:  # no client is waited for, and no timer is needed
                await self.writer.drain()
            else:
                await self._drain()
        except (ConnectionError, RuntimeError):
            if not self._client_is_gone:
                self._client_is_gone = True
                self._reading.reschedule(self.loop.time())  # ends the reading
            await self.protocol.handle(Closed())

    async def _drain(self) -> None:
        """Wait for a slow client. Raises: ConnectionError if it reads nothing for too long; the buffer is freed."""
        limit_s, transport = self.config.write_timeout_s, self.writer.transport
        while True:
            num_waiting = transport.get_write_buffer_size()
            try:
                async with asyncio.timeout(limit_s if math.isfinite(limit_s) else None):
                    await self.writer.drain()
                return
            except TimeoutError:
                if transport.get_write_buffer_size() < num_waiting:
                    continue
                _log.info("a client has read nothing for %g s, and is cut off", limit_s)
                transport.abort()
                raise ConnectionAbortedError from None

    async def protocol_send(self, event: Event) -> None:
        if isinstance(event, RawData):
            await self.write(event.data)
        elif not (self._client_is_gone and isinstance(event, Updated)):
            await super().protocol_send(event)

    async def _idle_timeout(self) -> None:
        with suppress(TimeoutError):
            # Python 3.11's wait_for loses a cancel that comes with the result. A request cancels this, and would then
            # wait for the end of its own connection.
            async with asyncio.timeout(self.config.keep_alive_timeout):
                await self.context.terminated.wait()
            await asyncio.sleep(_LAST_REQUEST_S)
        await asyncio.shield(self._initiate_server_close())

    async def _close(self) -> None:
        aborting = self.loop.call_later(_CLOSE_TIMEOUT_S, self.writer.transport.abort)
        try:
            await super()._close()
        finally:
            aborting.cancel()


async def _stay_with_http1(_: hypercorn.protocol.h11.H11Protocol, __: object) -> None:
    """Ignore a request to upgrade to HTTP/2 without TLS, and answer it in HTTP/1.

    Clients of this API do not need HTTP/2. Hypercorn's HTTP/2 connections are never idle, and it mishandles streams
    that are reset quickly.
    """


async def _recycle(protocol: hypercorn.protocol.h11.H11Protocol) -> None:
    """Keep the connection for another request, unless the answer said that it closes; also when the server ends.

    Hypercorn closes it then at once, and so loses a request that its client is just sending.
    """
    await protocol._close_stream()
    is_kept = protocol.connection.our_state is protocol.connection.their_state is h11.DONE
    if is_kept:
        protocol.connection.start_next_cycle()
        protocol.response = None
        protocol.scope = None
    await protocol.can_read.set()
    await protocol.send(Updated(idle=True) if is_kept else Closed())


_create_stream = hypercorn.protocol.h11.H11Protocol._create_stream


async def _stay_with_requests(protocol: hypercorn.protocol.h11.H11Protocol, request: h11.Request) -> None:
    """Answer a request for a web socket as if it asked for none, as HTTP allows.

    The API has no web sockets. Hypercorn keeps a connection open for ever once it refused the socket's version.
    """
    if any(name == b"upgrade" for name, _ in request.headers):
        headers = [(name, value) for name, value in request.headers if name != b"upgrade"]
        request = h11.Request(
            method=request.method, target=request.target, headers=headers, http_version=request.http_version
        )
    await _create_stream(protocol, request)


def _adjust_hypercorn() -> None:
    """Patch behaviour for which hypercorn has no settings."""
    for owner, name, ours in (
        (hypercorn.asyncio.run, "TCPServer", _Connection),
        (hypercorn.protocol.h11.H11Protocol, "_check_protocol", _stay_with_http1),
        (hypercorn.protocol.h11.H11Protocol, "_create_stream", _stay_with_requests),
        (hypercorn.protocol.h11.H11Protocol, "_maybe_recycle", _recycle),
        (hypercorn.protocol.h11, "HTTPStream", DirectStream),
        (hypercorn.asyncio.tcp_server, "MAX_RECV", _READ_BYTES),
    ):
        setattr(owner, name, ours)


def _log_loop_error(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log an error of a connection in one line, because a client must not be able to fill the log with tracebacks."""
    error = context.get("exception")
    if isinstance(error, asyncio.CancelledError):
        return
    message = " ".join(str(context.get("message", "")).split())[:500]
    _log.error("a connection met a bug: %s", describe_bug(error) if isinstance(error, BaseException) else message)


class _OneLineLogger(hypercorn.logging.Logger):
    """Hypercorn's log without its start-up lines, and with one line per bug."""

    async def info(self, message: str, *args: Any, **kwargs: Any) -> None:
        """Drop hypercorn's line that it is ready, because we print our own."""

    async def exception(self, message: str, *args: Any, **kwargs: Any) -> None:
        error = sys.exc_info()[1]
        if isinstance(error, asyncio.CancelledError):
            return
        _log.error("a request met a bug: %s", describe_bug(error) if error is not None else message)


def describe_bug(error: BaseException) -> str:
    """An unexpected exception in one line: its type, its text, and where it was raised. For logs, never for clients."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    frames = traceback.extract_tb(error.__traceback__)
    place = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:500]}{place}"


def _bind_problem(host: str, port: int, error: OSError) -> str:
    match error.errno:
        case errno.EADDRINUSE:
            return f"port {port} on {host} is in use"
        case errno.EACCES:
            return f"port {port} on {host} needs privileges that this process does not have"
        case errno.EADDRNOTAVAIL:
            return f"{host} is not an address of this machine"
        case code:
            reason = os.strerror(code) if code is not None else "unknown error"
            return f"cannot listen on {host} port {port}: {reason}"
