"""The engine of a simulated instance: the times of its steps and copies, from a profile."""

import random
from collections import deque
from collections.abc import Iterator, Sequence
from math import inf

from actorserve.core.effects import SwapIn, SwapOut
from actorserve.core.instance.quiet_steps import Ending
from actorserve.core.instance.steps import Step, Steps, plan_after_s
from actorserve.core.messages import StepDone
from actorserve.core.timing.profile import Profile
from actorserve.core.timing.step_times import Iteration, StepTimes
from actorserve.sim.measures.occupancy import Occupancy
from actorserve.sim.power.machine_power import MachinePower
from actorserve.sim.step_costs import StepCosts

TOKEN_ID = 0
"""Every output token of a simulation; requests end by their length alone."""


_NUM_PREDICTED = 8  # quiet steps that are predicted at once, because most runs are cut short by a message


class Flight:
    """A step in flight, and the quiet steps that will follow it (``core.instance.quiet_steps``).

    The next of them are predicted, and ``num_later`` more are not.
    """

    __slots__ = (
        "_endings",
        "_num_begun",
        "_num_ended",
        "_num_left",
        "cap",
        "chunks",
        "ends",
        "event_s",
        "learned",
        "noises",
        "num_context_tokens",
        "num_decodes",
        "num_later",
        "planned_s",
        "request_ids",
    )

    def __init__(self, step: Step, num_quiet: int, planned_s: float, endings: Sequence[Ending]) -> None:
        """``endings``: of the requests in ``step``, in order of time."""
        self.request_ids = tuple([request.request_id for request, _ in step.batch.rows])
        self.ends: list[tuple[float, float]] = []  # each step's end and duration; the first step is in flight
        self.num_later = num_quiet + 1
        self.cap = 1.0  # of the machine's power, under which the predicted durations hold
        self.planned_s = planned_s  # when the next step that is not predicted is planned
        self.event_s: float | None = None  # when the core will be told
        self.learned: StepTimes | None = None  # the core's times then, if its plans may come too late
        self.noises: Iterator[float] | None = None  # the factors of the steps that are not predicted
        self.chunks: list[tuple[int, int]] = []
        self.num_decodes = self.num_context_tokens = 0  # of the next step that is not predicted
        for (_, num_fed), start in zip(step.batch.rows, step.starts, strict=True):
            if num_fed == 1:
                self.num_decodes += 1
                self.num_context_tokens += start + 1
            else:
                self.chunks.append((num_fed, start))
        self._endings = endings
        self._num_begun = 0  # steps that are predicted, or have ended
        self._num_ended = 0
        self._num_left = 0  # requests that have ended, or are predicted to

    @property
    def is_quiet(self) -> bool:
        """Whether quiet steps follow the step in flight."""
        return len(self.ends) > 1

    @property
    def num_to_ending(self) -> int:
        """How many steps end until a request has its last token, by one of the quiet steps that are predicted. If none
        does: how many quiet steps end before the last one that is predicted.
        """
        num_quiet = len(self.ends) - 1
        return min(self._endings[0][0] + 1 - self._num_ended, num_quiet) if self._endings else num_quiet

    @property
    def next_event_s(self) -> float:
        """When the core must be told: when a request ends; at the end of the last quiet step, because the core plans
        what follows the step after it; or at the end of that step.
        """
        return self.ends[max(0, self.num_to_ending - 1)][0]

    def num_ended(self, now: float) -> int:
        """How many steps have ended, not counting the last step."""
        ends = self.ends
        num_ended = 0
        while num_ended < len(ends) - 1 and ends[num_ended][0] <= now:
            num_ended += 1
        return num_ended

    def predict(self, end_s: float, duration_s: float) -> None:
        """The end of one more step."""
        self.ends.append((end_s, duration_s))
        self.num_context_tokens += self.num_decodes
        endings = self._endings
        while self._num_left < len(endings) and endings[self._num_left][0] == self._num_begun:
            self.num_decodes -= 1
            self.num_context_tokens -= endings[self._num_left][1]
            self._num_left += 1
        self._num_begun += 1

    def drop(self, num_steps: int) -> None:
        """The core knows that so many quiet steps have ended."""
        del self.ends[:num_steps]
        self._num_ended += num_steps
        ended = [request_id for num_before, _, request_id in self._endings if num_before < self._num_ended]
        if ended:
            self._endings = self._endings[len(ended) :]
            self._num_left -= len(ended)
            self.request_ids = tuple([request_id for request_id in self.request_ids if request_id not in ended])

    def cut(self, num_quiet: int) -> bool:
        """At most ``num_quiet`` steps follow the step in flight. True if the next event may come sooner."""
        num_predicted = len(self.ends) - 1
        self.num_later = max(0, min(self.num_later, num_quiet - num_predicted))
        if num_quiet >= num_predicted:
            return False
        del self.ends[num_quiet + 1 :]
        return True


class EngineModel:
    """Takes the steps and copies that the core asks of an engine, and computes when they are done.

    Copies run in parallel to steps. Swaps out, swaps in, and copies between instances each have a link, on which one
    copy follows another. A step that begins while copies run takes longer, by ``copy_slowdown`` times the overlap.
    ``noise`` is the standard deviation of a step's duration, as a share of it. A step begins ``pause_s`` (None:
    the profile's pause) after it was planned, and not before the step before it has ended.

    With ``run_ahead`` the core plans steps ahead of need (``core.instance.steps``), at times that follow from the
    durations that it has learned. For quiet steps a copy of what it has learned goes on learning here, so that they
    begin when single steps would.
    """

    def __init__(
        self,
        profile: Profile,
        bytes_per_block: int,
        rng: random.Random,
        *,
        costs: StepCosts,
        pause_s: float | None,
        copy_slowdown: float,
        noise: float,
        run_ahead: bool,
        occupancy: Occupancy | None = None,
        power: MachinePower | None = None,
    ) -> None:
        """``power``: None if the energy is not asked for."""
        self.occupancy = occupancy or Occupancy(inf)
        self.power = power
        self._profile = profile
        self._costs = costs
        self._bytes_per_block = bytes_per_block
        self._pause_s = pause_s
        self._has_pauses = bool(profile.pause_s or profile.pause_row_s if pause_s is None else pause_s)
        self._copy_slowdown = copy_slowdown
        self._noise = noise
        self._run_ahead = run_ahead
        self._rng = rng
        self._noises: deque[float] = deque()  # one for each future step, kept if its duration is predicted again
        self._out_free_s = 0.0
        self._in_free_s = 0.0
        self._link_free_s = 0.0
        self._urgent_free_s = 0.0
        self._paced_free_s: dict[EngineModel, float] = {}  # by source
        self._transfers_until_s = 0.0
        self.busy_s = 0.0
        self.num_steps = 0
        self.num_rows = 0

    def begin(
        self,
        step: Step,
        num_quiet: int,
        planned_s: float,
        before: Flight | None,
        core_steps: Steps,
        endings: Sequence[Ending] = (),
    ) -> Flight:
        """Begin ``step``, the newest of ``core_steps``, which was planned at ``planned_s``; ``num_quiet`` steps follow
        it, with the same requests but for the ``endings``. ``before``: the step in flight, if there is one.
        """
        num_before, (free_s, before_s) = (0, (0.0, 0.0)) if before is None else (1, before.ends[0])
        flight = Flight(step, num_quiet, planned_s, endings)
        if self.power is not None:
            flight.cap = self.power.cap
        if self._noise:
            flight.noises = self._noises_from(self.num_steps + num_before)
        if num_quiet and self._run_ahead and self._has_pauses:
            flight.learned = core_steps.times_after(before_s)
        self._predict(flight, free_s)
        return flight

    def predict_more(self, flight: Flight) -> bool:
        """Predict the next quiet steps. False if all of them are predicted already."""
        if not flight.num_later:
            return False
        self._predict(flight, flight.ends[-1][0])
        return True

    def _predict(self, flight: Flight, free_s: float) -> None:
        num_predicted = min(_NUM_PREDICTED, flight.num_later)
        flight.num_later -= num_predicted
        planned_s, learned = flight.planned_s, flight.learned
        for _ in range(num_predicted):
            num_decodes, num_context_tokens = flight.num_decodes, flight.num_context_tokens
            began_s = max(free_s, planned_s)  # for the core, which does not know of the pause
            begins_s, duration_s = self._time_step(flight.chunks, num_decodes, num_context_tokens, planned_s, free_s)
            duration_s = self._with_copies(duration_s, begins_s)
            if flight.noises is not None:
                duration_s *= next(flight.noises)
            planned_s = free_s = max(began_s, begins_s + duration_s)
            if learned is not None:
                iteration = Iteration(self._profile, num_decodes, num_context_tokens)
                planned_s = min(free_s, began_s + plan_after_s(learned.step_s(iteration)))
                learned.observe(iteration, duration_s)
            flight.predict(free_s, duration_s)
        flight.planned_s = planned_s

    def _time_step(
        self,
        chunks: Sequence[tuple[int, int]],
        num_decodes: int,
        num_context_tokens: int,
        planned_s: float,
        free_s: float,
    ) -> tuple[float, float]:
        """When a step begins that is planned at ``planned_s``, if the step before it ends at ``free_s``; and its
        duration without copies and noise.
        """
        pause_s = self._pause_s
        if pause_s is None:
            pause_s = self._profile.idle_s(len(chunks) + num_decodes)
        return max(free_s, planned_s + pause_s), self._costs.step_s(chunks, num_decodes, num_context_tokens)

    def done(self, flight: Flight, step: Step) -> StepDone:
        """The answer to ``step``, once it has ended and is its flight's last one."""
        ((_, duration_s),) = flight.ends
        request_ids: list[str] = []
        positions: list[int] = []
        for (request, num_fed), start, samples in zip(step.batch.rows, step.starts, step.samples, strict=True):
            if samples:
                request_ids.append(request.request_id)
                positions.append(start + num_fed - request.num_prompt)
        self.count(flight, 1, len(request_ids))
        return StepDone(step.step_id, duration_s, tuple(request_ids), tuple(positions), (TOKEN_ID,) * len(request_ids))

    def set_costs(self, costs: StepCosts) -> None:
        """Iterations that begin from now on take these times. Predictions must be forgotten before."""
        self._costs = costs

    def count(self, flight: Flight, num_steps: int, num_tokens: int) -> None:
        """The first steps of a flight have ended, and each of them made ``num_tokens`` output tokens."""
        num_prompt_tokens = sum([num_fed for num_fed, _ in flight.chunks])
        num_in_batch = num_prompt_tokens + len(flight.request_ids) - len(flight.chunks)
        for end_s, duration_s in flight.ends[:num_steps]:
            self.busy_s += duration_s
            self.occupancy.add(num_in_batch, duration_s, end_s)
            if self.power is not None:
                self.power.add(num_prompt_tokens, num_tokens, duration_s, end_s, flight.cap)
        self.num_steps += num_steps
        for _ in range(min(num_steps, len(self._noises))):
            self._noises.popleft()
        self.num_rows += num_steps * len(flight.request_ids)

    def copy(self, effect: SwapOut | SwapIn, now: float) -> tuple[float, float]:
        """When this copy is done, after earlier copies in its direction, and how long it takes on its own."""
        duration_s = self._profile.swap.copy_s(len(effect.device_blocks) * self._bytes_per_block)
        if isinstance(effect, SwapOut):
            self._out_free_s = max(now, self._out_free_s) + duration_s
            return self._out_free_s, duration_s
        self._in_free_s = max(now, self._in_free_s) + duration_s
        return self._in_free_s, duration_s

    def fetch(
        self,
        source: "EngineModel",
        num_blocks: int,
        now: float,
        *,
        bytes_per_s: float | None,
        is_urgent: bool,
        into_host: bool = False,
        share: float = 1.0,
    ) -> tuple[float, float]:
        """When a copy of this many blocks from another instance is done, and how long that is from ``now``.

        A copy uses the links of both instances at their whole speed, one copy after the other. An urgent copy waits
        only for other urgent copies, and goes before all copies that have not begun. ``bytes_per_s`` paces the copies
        from one source that are not urgent. A copy ``into_host`` memory slows only the source's iterations down.
        ``share``: of the blocks' bytes.
        """
        num_bytes = share * self.num_bytes(num_blocks)
        ends = (self, source)
        copy_s = self.copy_alone_s(source, num_blocks, share)
        if is_urgent:
            done_s = max(now, *(engine._urgent_free_s for engine in ends)) + copy_s
            for engine in ends:
                engine._urgent_free_s = done_s
                engine._link_free_s = max(now, engine._link_free_s) + copy_s
        else:
            done_s = max(now, *(engine._link_free_s for engine in ends)) + copy_s
            for engine in ends:
                engine._link_free_s = done_s
            if bytes_per_s is not None:
                paced_s = max(now, self._paced_free_s.get(source, now)) + num_bytes / bytes_per_s
                self._paced_free_s[source] = paced_s
                done_s = max(done_s, paced_s)
        self.slow_down(source, done_s, into_host)
        return done_s, done_s - now

    def num_bytes(self, num_blocks: int) -> int:
        return num_blocks * self._bytes_per_block

    @property
    def link_bytes_per_s(self) -> float:
        """The bandwidth of the link to other machines."""
        return self._profile.transfer.bytes_per_s

    def link_latency_s(self, source: "EngineModel") -> float:
        """Of a copy from another instance."""
        return max(self._profile.transfer.latency_s, source._profile.transfer.latency_s)

    def copy_alone_s(self, source: "EngineModel", num_blocks: int, share: float = 1.0) -> float:
        """How long a copy of a ``share`` of this many blocks from another instance takes if there are no other
        copies.
        """
        num_bytes = share * self.num_bytes(num_blocks)
        return max(engine._profile.transfer.copy_s(num_bytes) for engine in (self, source))

    def slow_down(self, source: "EngineModel", until_s: float, into_host: bool) -> None:
        """Iterations of both engines take longer until a copy from ``source`` ends, and with ``into_host`` those of the
        source alone.
        """
        for engine in (source,) if into_host else (self, source):
            engine._transfers_until_s = max(engine._transfers_until_s, until_s)

    def _noises_from(self, number: int) -> Iterator[float]:
        """The noise factors of this step and the steps after it, counted over the engine's life."""
        noises = self._noises
        while True:
            place = number - self.num_steps
            while len(noises) <= place:
                noises.append(max(0.1, self._rng.gauss(1.0, self._noise)))
            yield noises[place]
            number += 1

    def _with_copies(self, duration_s: float, now: float) -> float:
        copying_s = max(self._out_free_s, self._in_free_s, self._transfers_until_s) - now
        if not self._copy_slowdown or copying_s <= 0.0:
            return duration_s
        return duration_s + self._copy_slowdown * min(duration_s, copying_s)
