"""The process that checks grammars for a gateway.

llguidance cannot be interrupted, and a hostile grammar can exhaust its stack. So each check runs in a child process of
its own, a fork that has the model's vocabulary already. The kernel ends a child that takes too much time or memory.

The gateway writes the vocabulary to standard input, and passes a listening socket, the limit on computing time in
seconds, and its process id as arguments. A connection carries one request and one answer, both JSON: ``Request`` and
``Answer``. A child that the kernel ended gives no answer.
"""

import json
import os
import resource
import signal
import socket
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass
from socketserver import BaseRequestHandler, BaseServer, ForkingMixIn, UnixStreamServer
from typing import Any, Literal

import msgpack
from llguidance.gbnf_to_lark import GbnfToLarkError, any_to_lark

from actorserve.core.messages import MAX_GRAMMAR_BYTES
from actorserve.model_files.grammars import GrammarCompiler, GrammarError, Vocabulary

_MAX_MORE_BYTES = 512 * 2**20
_STACK_BYTES = 2**20  # less than the threads of a worker have, which compile the grammar again
_MAX_RECEIVED_BYTES = 2 * MAX_GRAMMAR_BYTES + 1024
_POLL_S = 0.5


@dataclass(frozen=True, slots=True)
class Request:
    """``kind``: grammar (llguidance's JSON text), or ebnf (llama.cpp's GBNF or Lark, as its form says)."""

    kind: Literal["grammar", "ebnf"]
    text: str


@dataclass(frozen=True, slots=True)
class Answer:
    """The grammar as llguidance's JSON text, or what is wrong with it. One of them is empty."""

    grammar: str = ""
    problem: str = ""


def check(compiler: GrammarCompiler, request: Request) -> Answer:
    """Compile the grammar and begin an answer, as a worker will."""
    try:
        grammar = request.text
        if request.kind == "ebnf":
            grammar = json.dumps({"grammars": [{"lark_grammar": any_to_lark(request.text)}]}, ensure_ascii=False)
        compiler.try_out(compiler.compile(grammar))
    except (GrammarError, GbnfToLarkError) as error:
        return Answer(problem=str(error))
    except RecursionError:
        return Answer(problem="it is nested too deeply")
    return Answer(grammar)


class _Handler(BaseRequestHandler):
    """Checks the grammar of one connection. It runs in a process of its own."""

    server: "_Server"
    request: socket.socket

    def handle(self) -> None:
        limit_process(self.server.cpu_s)
        with self.request.makefile("rb") as reader:
            request = Request(**json.loads(reader.read(_MAX_RECEIVED_BYTES)))
        self.request.sendall(json.dumps(asdict(check(self.server.compiler, request))).encode())


class _Server(ForkingMixIn, UnixStreamServer):
    max_children = 64  # the gateway has fewer checks at once

    def __init__(self, listener: socket.socket, compiler: GrammarCompiler, cpu_s: float, gateway: int) -> None:
        BaseServer.__init__(self, "", _Handler)
        self.socket = listener
        self.compiler = compiler
        self.cpu_s = cpu_s
        self._gateway = gateway

    def service_actions(self) -> None:
        """Called twice a second, and after each request."""
        super().service_actions()
        if os.getppid() != self._gateway:
            os._exit(0)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """The gateway sees that there is no answer."""


def limit_process(cpu_s: float) -> None:
    """From now on, the kernel ends this process if it takes more than ``cpu_s`` of computing time, or much memory.

    It prints nothing any more, because a client must not be able to fill the log.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    with open("/proc/self/statm", encoding="ascii") as sizes:
        size_bytes = int(sizes.read().split()[0]) * resource.getpagesize()
    for kind, most in ((resource.RLIMIT_AS, size_bytes + _MAX_MORE_BYTES), (resource.RLIMIT_STACK, _STACK_BYTES)):
        resource.setrlimit(kind, (most, resource.getrlimit(kind)[1]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def main() -> None:
    listener = socket.socket(fileno=int(sys.argv[1]))
    vocabulary = Vocabulary(*msgpack.unpackb(sys.stdin.buffer.read(), max_bin_len=2**20))
    compiler = GrammarCompiler(vocabulary)
    with suppress(GrammarError):  # without an end-of-sequence token, each check says so
        compiler.load()
    _Server(listener, compiler, float(sys.argv[2]), int(sys.argv[3])).serve_forever(_POLL_S)


if __name__ == "__main__":
    main()
