"""Checks grammars in another process, so that no grammar stops or slows the gateway."""

import asyncio
import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import weakref
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Literal

import msgpack

import actorserve
from actorserve.core.messages import MAX_GRAMMAR_BYTES
from actorserve.errors import InvalidRequestError
from actorserve.http.errors import RequestFailedError
from actorserve.http.structured.check_process import Answer, Request
from actorserve.model_files.grammars import Vocabulary

_MAX_AT_ONCE = 2
_MAX_WAITING = 64
_MAX_KNOWN = 64
_MAX_SHOWN_CHARS = 200
_PATIENCE = 20.0
"""How many times its computing time a check may take in all, with waiting for others and for a busy machine."""
_START_S = 20.0
_RETRY_S = 1.0


class GrammarChecker:
    """Owns the process, which starts with the first check and ends with this object. Results are kept for a while."""

    def __init__(self, vocabulary: Callable[[], Vocabulary], cpu_s: float) -> None:
        """``cpu_s``: computing time of one check. ``vocabulary`` is called in another thread, once for each start."""
        self._vocabulary = vocabulary
        self._cpu_s = cpu_s
        self._known: OrderedDict[bytes, Answer] = OrderedDict()
        self._slots = asyncio.Semaphore(_MAX_AT_ONCE)
        self._starting = asyncio.Lock()
        self._num_waiting = 0
        self._process: _Process | None = None

    async def check(self, text: str, param: str, kind: Literal["grammar", "ebnf"] = "grammar") -> str:
        """The grammar of ``text`` (``check_process.Request``), which works with the model's vocabulary.

        Raises: InvalidRequestError that names ``param`` if the text is invalid, or needs too much time or memory;
        RequestFailedError if it cannot be checked now.
        """
        data = text.encode("utf-8", "replace")
        if len(data) > MAX_GRAMMAR_BYTES:
            raise too_large(param)
        key = hashlib.blake2b(data, person=kind.encode()).digest()
        answer = self._known.get(key)
        if answer is None:
            answer = await self._ask(Request(kind, data.decode()), param)
            self._known[key] = answer
            if len(self._known) > _MAX_KNOWN:
                self._known.popitem(last=False)
        if answer.problem:
            raise InvalidRequestError(f"{param}: {_one_line(answer.problem)}", param, "invalid_grammar")
        return answer.grammar

    async def _ask(self, request: Request, param: str) -> Answer:
        if self._num_waiting >= _MAX_WAITING:
            message = "too many grammars are being checked; try again later"
            raise RequestFailedError(429, message, param, "overloaded", _RETRY_S)
        self._num_waiting += 1
        try:
            async with asyncio.timeout(_START_S + _PATIENCE * self._cpu_s), self._slots:
                data = await (await self._running()).ask(json.dumps(asdict(request)).encode())
        except (TimeoutError, OSError):
            message = "the grammar could not be checked; try again later"
            raise RequestFailedError(503, message, param, "overloaded", _RETRY_S) from None
        finally:
            self._num_waiting -= 1
        if not data:
            return Answer(problem="it takes too much time or memory to compile; use a simpler one")
        return Answer(**json.loads(data))

    async def _running(self) -> "_Process":
        async with self._starting:
            if self._process is None or not self._process.is_alive:
                self._process = await asyncio.to_thread(lambda: _Process(self._vocabulary(), self._cpu_s))
            return self._process


class _Process:
    """A process of ``check_process``. It ends when this object is collected."""

    def __init__(self, vocabulary: Vocabulary, cpu_s: float) -> None:
        """Blocks until the process has read the vocabulary. Raises: OSError if it cannot be started."""
        folder = tempfile.mkdtemp(prefix="actorserve-grammars-")
        self._path = str(Path(folder) / "check.sock")
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(self._path)
            listener.listen(_MAX_AT_ONCE)
            module = "actorserve.http.structured.check_process"
            arguments = (str(listener.fileno()), str(cpu_s), str(os.getpid()))
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", module, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                pass_fds=[listener.fileno()],
                env=os.environ | {"PYTHONPATH": str(Path(actorserve.__file__).parents[1])},
            )
        self._end = weakref.finalize(self, _end, self._process, folder)
        assert self._process.stdin is not None
        with self._process.stdin as stdin:
            stdin.write(msgpack.packb(vocabulary))

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    async def ask(self, request: bytes) -> bytes:
        """The answer; empty if the kernel ended the check. Raises: OSError if the process has ended."""
        reader, writer = await asyncio.open_unix_connection(self._path)
        try:
            writer.write(request)
            writer.write_eof()
            return await reader.read()
        finally:
            writer.close()


def _end(process: "subprocess.Popen[bytes]", folder: str) -> None:
    process.kill()
    process.wait()
    shutil.rmtree(folder, ignore_errors=True)


def too_large(param: str) -> InvalidRequestError:
    """The error for a text beyond the limit on its size."""
    return InvalidRequestError(f"{param}: larger than {MAX_GRAMMAR_BYTES} bytes", param, "invalid_grammar")


def _one_line(text: str) -> str:
    """The problem in one line, cut short, because the client's own text may be in it."""
    line = "".join(char if char.isprintable() else " " for char in " ".join(text[:1000].split()))
    return line if len(line) <= _MAX_SHOWN_CHARS else f"{line[:_MAX_SHOWN_CHARS]}..."
