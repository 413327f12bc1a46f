"""Clients beside the hostile input: their requests must get exactly their tokens, whatever else arrives."""

import json
import threading
import time
from typing import Final

import httpx

from actorserve.console.outcome import as_objects
from actorserve.console.session import Session
from actorserve.wire.console import ConsoleClient
from tools.fuzzing.errors import BrokenServerError
from tools.fuzzing.server import NUM_WORKERS, Server

_NUM: Final = 3
_TOKENS: Final = 24
_PAUSE_S: Final = 0.2
_TIMEOUT_S: Final = 60.0
_ANSWER_S: Final = 60.0
_NUM_HEALTH: Final = 8  # connections, so that each gateway very likely gets one


class Witnesses:
    """Threads that ask the same questions again and again."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._url = f"http://127.0.0.1:{server.http_port}"
        self._expected = [self._ask(number) for number in range(_NUM)]
        self._is_over = threading.Event()
        self._failures: list[str] = []
        self.num_answers = [0] * _NUM
        self._threads = [threading.Thread(target=self._repeat, args=(number,), daemon=True) for number in range(_NUM)]
        for thread in self._threads:
            thread.start()

    def check(self) -> None:
        """Every witness gets another answer, every process answers. Raises: BrokenServerError."""
        before, until_s = list(self.num_answers), time.monotonic() + _ANSWER_S
        while any(now <= then for now, then in zip(self.num_answers, before, strict=True)):
            self._raise_failures()
            if time.monotonic() > until_s:
                raise BrokenServerError(f"a real request has had no answer for {_ANSWER_S:.0f} s")
            time.sleep(0.02)
        self._raise_failures()
        for _ in range(_NUM_HEALTH):
            try:
                status = httpx.get(f"{self._url}/health", timeout=_TIMEOUT_S, trust_env=False).status_code
            except httpx.HTTPError as error:
                raise BrokenServerError(f"/health: {type(error).__name__}") from None
            if status != httpx.codes.OK:
                raise BrokenServerError(f"/health answers {status}")
        self._check_workers()

    def close(self) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()

    def _check_workers(self) -> None:
        console = ConsoleClient(self._server.console_address)
        try:
            until_s = time.monotonic() + _ANSWER_S
            while True:
                answer = Session(console, _TIMEOUT_S).read("workers")
                if answer is None:
                    raise BrokenServerError("the coordinator does not answer a console")
                states = {row["worker"]: row["state"] for row in as_objects(answer)}
                if list(states.values()) == ["open"] * NUM_WORKERS:
                    return
                if time.monotonic() > until_s:
                    raise BrokenServerError(f"the coordinator sees the workers {states}")
                time.sleep(0.1)
        finally:
            console.close()

    def _raise_failures(self) -> None:
        if self._failures:
            raise BrokenServerError(f"a real request beside it: {self._failures[0]}")

    def _repeat(self, number: int) -> None:
        while not self._is_over.wait(_PAUSE_S):
            try:
                tokens = self._ask(number)
            except (httpx.HTTPError, BrokenServerError, ValueError, KeyError, IndexError) as error:
                self._failures.append(f"{type(error).__name__}: {error}"[:500])
                return
            if tokens != self._expected[number]:
                self._failures.append(
                    f"question {number} got {tokens[:8]}..., and first {self._expected[number][:8]}..."
                )
                return
            self.num_answers[number] += 1

    def _ask(self, number: int) -> list[str]:
        """The answer's tokens. Raises: BrokenServerError, httpx.HTTPError."""
        body = {
            "model": self._server.model,
            "prompt": [number + 1, *range(100, 120 + 5 * number)],
            "max_tokens": _TOKENS,
            "ignore_eos": True,
            "seed": number,
            "temperature": 1.0,
            "logprobs": 1,
            "stream": True,
        }
        tokens: list[str] = []
        with (
            httpx.Client(timeout=_TIMEOUT_S, trust_env=False) as client,
            client.stream("POST", f"{self._url}/v1/completions", json=body) as answer,
        ):
            if answer.status_code != httpx.codes.OK:
                raise BrokenServerError(f"status {answer.status_code}: {answer.read()[:200]!r}")
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line[6:])
                    if "choices" not in event:
                        raise BrokenServerError(line[:300])
                    choice = event["choices"][0]
                    tokens += choice["logprobs"]["tokens"] if choice["logprobs"] else []
        if len(tokens) != _TOKENS:
            raise BrokenServerError(f"{len(tokens)} tokens instead of {_TOKENS}")
        return tokens
