"""What the end of a listening socket does to the connections that are on their way to it (Linux)."""

import ctypes
import os
import socket
from contextlib import suppress
from typing import Final

_SO_ATTACH_FILTER: Final = 26  # Python's socket module lacks it
_LOAD_BYTE, _AND, _JUMP_IF_EQUAL, _RETURN = 0x30, 0x54, 0x15, 0x06
_FLAGS_AT: Final = 13  # in a TCP header
_SYN, _ACK = 0x02, 0x10
_ALL_BYTES: Final = 0xFFFFFFFF


class _Instruction(ctypes.Structure):
    """The kernel's ``struct sock_filter``."""

    _fields_ = (
        ("code", ctypes.c_uint16),
        ("then", ctypes.c_uint8),
        ("otherwise", ctypes.c_uint8),
        ("k", ctypes.c_uint32),
    )


class _Program(ctypes.Structure):
    """The kernel's ``struct sock_fprog``."""

    _fields_ = (("length", ctypes.c_uint16), ("instructions", ctypes.POINTER(_Instruction)))


_NO_NEW_CONNECTIONS = (_Instruction * 5)(
    _Instruction(_LOAD_BYTE, 0, 0, _FLAGS_AT),
    _Instruction(_AND, 0, 0, _SYN | _ACK),
    _Instruction(_JUMP_IF_EQUAL, 0, 1, _SYN),
    _Instruction(_RETURN, 0, 0, 0),
    _Instruction(_RETURN, 0, 0, _ALL_BYTES),
)


def ignore_new_connections(descriptor: int) -> None:
    """Have the kernel drop requests for new connections to this listening socket. Those it holds can be accepted.

    Closing a listening socket resets every connection that it has not accepted yet. So a server first calls this, then
    accepts what has arrived, and then closes. A client that asked meanwhile asks again after a second, and meets
    another process that listens on the port, if there is one. A kernel that refuses the filter changes nothing.
    """
    program = _Program(len(_NO_NEW_CONNECTIONS), _NO_NEW_CONNECTIONS)
    with socket.socket(fileno=os.dup(descriptor)) as listener, suppress(OSError):
        listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, bytes(program))
