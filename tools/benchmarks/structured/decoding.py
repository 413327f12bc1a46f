"""Answers of our engine alone: batches of requests that are prefilled one by one and decoded together."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from actorserve.core.messages import RequestSpec, StepPlan
from workers.engine import Engine


@dataclass(slots=True)
class Decoded:
    """A request, its output so far, and whether it ended by itself."""

    spec: RequestSpec
    table: tuple[int, ...]
    output: list[int] = field(default_factory=list)
    has_ended: bool = False
    has_failed: bool = False


class DecodingBatch:
    """Decodes these requests until each has ended. Each has blocks of its own, from the engine's first block on."""

    def __init__(self, engine: Engine, specs: Sequence[RequestSpec]) -> None:
        """Prefill all requests. Raises: ValueError if the engine's pool is too small."""
        self._engine = engine
        self.requests: list[Decoded] = []
        first = 0
        for spec in specs:
            num_blocks = -(-(len(spec.prompt_token_ids) + spec.sampling.max_tokens) // engine.tokens_per_block)
            self.requests.append(Decoded(spec, tuple(range(first, first + num_blocks))))
            first += num_blocks
        if first > engine.num_blocks:
            raise ValueError(f"{first} blocks are needed, and the pool has {engine.num_blocks}")
        for request in self.requests:
            engine.add(request.spec, engine.prepare(request.spec))
            self._step([request], [request.spec.prompt_token_ids], [0])

    @property
    def running(self) -> list[Decoded]:
        return [
            request
            for request in self.requests
            if not (request.has_ended or request.has_failed) and len(request.output) < request.spec.sampling.max_tokens
        ]

    def decode(self) -> float:
        """One more token for each running request. Returns the iteration's seconds."""
        running = self.running
        starts = [len(request.spec.prompt_token_ids) + len(request.output) - 1 for request in running]
        return self._step(running, [(request.output[-1],) for request in running], starts)

    def end(self) -> None:
        """Take the requests from the engine."""
        for request in self.requests:
            self._engine.drop(request.spec.request_id)

    def _step(self, requests: Sequence[Decoded], token_ids: Sequence[tuple[int, ...]], starts: Sequence[int]) -> float:
        names = tuple(request.spec.request_id for request in requests)
        tables = tuple(request.table for request in requests)
        done = self._engine.begin(
            StepPlan(0, names, tuple(starts), tuple(token_ids), tables, (True,) * len(requests))
        ).result()
        made = dict(zip(done.request_ids, done.token_ids, strict=True))
        for request in requests:
            token_id = made.get(request.spec.request_id)
            if token_id is None:
                request.has_failed = True
                continue
            request.output.append(token_id)
            request.has_ended = token_id in request.spec.sampling.stop_token_ids
        return done.duration_s
