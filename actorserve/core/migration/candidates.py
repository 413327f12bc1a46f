"""Which request of an instance should move to another instance next (Llumnix, section 4.4.3)."""

import math
from collections.abc import Container, Mapping

from actorserve.core.kv.kv_memory import KVMemory
from actorserve.core.request import Request
from actorserve.core.timing.step_times import StepTimes

_GAIN = 0.05  # weight of the newest request in the mean output length


class MigrationCandidates:
    """Chooses requests whose move is likely to pay."""

    def __init__(
        self, requests: Mapping[str, Request], memory: KVMemory, times: StepTimes, bytes_per_s: float | None
    ) -> None:
        """``requests`` are the instance's. ``bytes_per_s`` bounds the rate of copies; None if nothing bounds it."""
        self._requests = requests
        self._memory = memory
        self._times = times
        self._bytes_per_s = bytes_per_s
        self._mean_output = math.inf  # tokens of requests that finished here recently

    def on_finished(self, request: Request) -> None:
        """Learn how long outputs are."""
        mean, num_output = self._mean_output, request.num_output
        self._mean_output = num_output if mean == math.inf else mean + _GAIN * (num_output - mean)

    def choose(self, max_bytes: int, moving: Container[str], *, decoding_only: bool = False) -> Request | None:
        """The request to move, of at most ``max_bytes`` of KV, and none of those ``moving`` (request ids) already.
        ``decoding_only``: it must be past the first token that this instance makes of it.

        Requests of low priority (a large number) go first, then those that need no copy, then short ones.
        """
        movable = (
            request
            for request in self._requests.values()
            if request.request_id not in moving
            and (request.has_decoded or not decoding_only)
            and self.can_move(request)
            and self._memory.bytes_of(request) <= max_bytes
            and self._pays(request)
        )
        return min(
            movable,
            key=lambda request: (-request.spec.priority, request.is_started, len(request.token_ids)),
            default=None,
        )

    def copy_s(self, num_bytes: int) -> float:
        """How long a copy should take: as measured, but at least what the rate's bound allows."""
        bound_s = num_bytes / self._bytes_per_s if self._bytes_per_s else 0.0
        return max(bound_s, self._times.transfer_s(num_bytes))

    def can_move(self, request: Request) -> bool:
        """Whether a move of the request may begin now."""
        if not request.is_started:
            return not self._memory.is_running(request)
        # A request that was handed over to this instance makes a token before it leaves again. Otherwise
        # MigrateTo messages that cross would send it back and forth.
        return request.has_decoded and request.copy_id is None and request.num_uncomputed == 1

    def _pays(self, request: Request) -> bool:
        """Whether it is likely to run for longer than the copy takes; otherwise the move gains nothing.

        Its remaining length is unknown. With heavy-tailed lengths a fair guess is as much as it has made already, or
        what is missing to the mean length if that is more.
        """
        if not request.is_started:
            return True
        num_output = request.num_output
        num_left = min(request.sampling.max_tokens - num_output, max(num_output, self._mean_output - num_output))
        copy_s = self.copy_s(self._memory.bytes_of(request))
        return num_left * self._times.decode_s(1, len(request.token_ids)) > copy_s
