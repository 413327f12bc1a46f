"""Clients that only cost: idle connections, streams that are not read, and prompts that are refused.

Run by ``tools/bench clients``. ``argv[1]`` holds its ``Options`` as JSON. It prints a line when its clients are there,
and ends when stdin ends.
"""

import json
import resource
import select
import socket
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

_READ_BYTES: Final = 65536
_SMALL_BUFFER: Final = 4096
_TIMEOUT_S: Final = 60.0


class Kind(StrEnum):
    IDLE = "idle"  # connections that had one answer and are kept
    STREAMING = "streaming"  # streams that were read until their first event
    NOT_READING = "not_reading"  # streams of which nothing is read
    REFUSED = "refused"  # one client after the other request, all with the same body


@dataclass(frozen=True, slots=True)
class Options:
    """``body`` is the requests' body, except for idle connections. Its prompt is repeated ``repeats`` times, because an
    argument of a process cannot be long.
    """

    port: int
    kind: Kind
    num: int
    body: dict[str, Any]
    repeats: int = 1


def _request(options: Options) -> bytes:
    if options.kind is Kind.IDLE:
        return b"GET /version HTTP/1.1\r\nhost: localhost\r\n\r\n"
    body = json.dumps(options.body | {"prompt": options.body["prompt"] * options.repeats}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n"
    return f"{head}content-type: application/json\r\n\r\n".encode() + body


def _connect(options: Options) -> socket.socket:
    connection = socket.socket()
    if options.kind is Kind.NOT_READING:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SMALL_BUFFER)
    connection.settimeout(_TIMEOUT_S)
    connection.connect(("127.0.0.1", options.port))
    return connection


def _read_answer(connection: socket.socket) -> None:
    """Read an answer whose body has a content-length."""
    data = b""
    while b"\r\n\r\n" not in data:
        data += _some(connection)
    head, _, body = data.partition(b"\r\n\r\n")
    length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
    num_missing = int(length.partition(b":")[2]) - len(body)
    while num_missing > 0:
        num_missing -= len(_some(connection))


def _some(connection: socket.socket) -> bytes:
    data = connection.recv(_READ_BYTES)
    if not data:
        raise ConnectionError("the server closed a connection")
    return data


def _repeat(options: Options) -> None:
    connection, request = _connect(options), _request(options)
    while True:
        connection.sendall(request)
        _read_answer(connection)


def _open(options: Options) -> list[socket.socket]:
    if options.kind is Kind.REFUSED:
        for _ in range(options.num):
            threading.Thread(target=_repeat, args=(options,), daemon=True).start()
        return []
    connections = []
    request = _request(options)
    for _ in range(options.num):
        connection = _connect(options)
        connection.sendall(request)
        if options.kind is Kind.IDLE:
            _read_answer(connection)
        connections.append(connection)
    for connection in connections if options.kind is Kind.STREAMING else ():
        data = b""
        while b"data:" not in data:
            data += _some(connection)
    return connections


def _drain(connections: Sequence[socket.socket]) -> None:
    """Read what comes for streams until stdin ends."""
    poll = select.epoll()
    by_number = {connection.fileno(): connection for connection in connections}
    for number in (0, *by_number):
        poll.register(number, select.EPOLLIN)
    while True:
        for number, _ in poll.poll():
            if number == 0:
                return
            by_number[number].recv(_READ_BYTES)


def main(arguments: Sequence[str]) -> int:
    told = json.loads(arguments[0])
    options = Options(**{**told, "kind": Kind(told["kind"])})
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    connections = _open(options)
    sys.stdout.write("there\n")
    sys.stdout.flush()
    if options.kind is Kind.STREAMING:
        _drain(connections)
    else:
        sys.stdin.read()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
