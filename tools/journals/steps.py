"""The iterations and swaps of a real worker, from its journal.

A journal holds the inputs of a core, and of its decisions only digests. So a new core gets the inputs, and plans the
same iterations again.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from math import inf
from pathlib import Path
from statistics import median

from actorserve.core.effects import Effect, RunStep, SwapIn, SwapOut
from actorserve.core.instance.state import InstanceState
from actorserve.core.messages import CopyDone, StepDone, StepPlan
from actorserve.core.timing.profile import Link, Profile
from actorserve.errors import ProtocolError
from actorserve.wire.journal import Entry
from actorserve.wire.replay import replay


class Kind(Enum):
    """What an iteration computes."""

    DECODE = "decodes only"
    PREFILL = "prefills only"
    MIXED = "prefills with decodes"
    BEHIND = "chunks behind context"
    """At least one prefill chunk with tokens before it: with or without decodes."""


@dataclass(frozen=True, slots=True)
class Work:
    """What an iteration computes, as far as its duration depends on it.

    ``chunks`` are prefill chunks, each (tokens, tokens before it). ``num_context_tokens`` are the tokens that all
    decodes attend to together.
    """

    chunks: tuple[tuple[int, int], ...]
    num_decodes: int
    num_context_tokens: int

    @property
    def kind(self) -> Kind:
        if not self.chunks:
            return Kind.DECODE
        if any(before for _, before in self.chunks):
            return Kind.BEHIND
        return Kind.MIXED if self.num_decodes else Kind.PREFILL

    @property
    def num_rows(self) -> int:
        return len(self.chunks) + self.num_decodes

    def predicted_s(self, profile: Profile) -> float:
        return profile.step_s(self.chunks, self.num_decodes, self.num_context_tokens)


def work_of(plan: StepPlan) -> Work:
    """A row of one token counts as a decode, because it takes as long as one."""
    chunks = []
    num_decodes = num_context_tokens = 0
    for fed, start in zip(plan.token_ids, plan.starts, strict=True):
        if len(fed) == 1:
            num_decodes += 1
            num_context_tokens += start + 1
        else:
            chunks.append((len(fed), start))
    return Work(tuple(chunks), num_decodes, num_context_tokens)


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """An iteration that a worker ran. Times are in seconds of the worker's clock.

    - ``planned_s``: when the core planned it.
    - ``free_s``: when the core heard that the iteration before had ended; minus infinity for the first one.
    - ``ended_s``: when the core heard that it had ended.
    - ``duration_s``: how long the engine computed it.
    """

    planned_s: float
    free_s: float
    ended_s: float
    duration_s: float
    work: Work

    @property
    def was_ahead(self) -> bool:
        """Whether it was planned while the iteration before it ran."""
        return self.planned_s < self.free_s

    @property
    def pause_s(self) -> float:
        """The time that it took in addition to its computation, from the moment at which it was planned and the engine
        was free. It is a little below 0 if the end of the iteration before was heard late.
        """
        return self.ended_s - max(self.planned_s, self.free_s) - self.duration_s


@dataclass(frozen=True, slots=True)
class Recording:
    """A worker's profile, and the iterations and swaps that ended, in their order. ``swaps`` are (bytes, seconds)."""

    profile: Profile
    steps: Sequence[RecordedStep]
    swaps: Sequence[tuple[int, float]] = ()

    def swap_link(self) -> Link:
        """The profile's link for swaps, with the level of the recorded ones."""
        link = self.profile.swap
        times = [seconds / link.copy_s(num_bytes) for num_bytes, seconds in self.swaps if seconds > 0.0]
        if not times:
            return link
        factor = median(times)
        return Link(factor * link.latency_s, link.bytes_per_s / factor)


def read_recording(file: Path) -> Recording:
    """Raises: OSError; ProtocolError if the file is no journal of a worker, or if this program decides otherwise than
    the worker did.
    """
    steps: list[RecordedStep] = []
    planned: dict[int, tuple[float, Work]] = {}
    blocks: dict[int, int] = {}  # of each swap
    swaps: list[tuple[int, float]] = []

    def take(entry: Entry, effects: Sequence[Effect]) -> None:
        match entry.message:
            case StepDone(step_id=step_id, duration_s=duration_s):
                planned_s, work = planned.pop(step_id)
                free_s = steps[-1].ended_s if steps else -inf
                steps.append(RecordedStep(planned_s, free_s, entry.now, duration_s, work))
            case CopyDone(copy_id=copy_id, duration_s=duration_s) if copy_id in blocks:
                swaps.append((blocks.pop(copy_id), duration_s))
        for effect in effects:
            match effect:
                case RunStep(plan=plan):
                    planned[plan.step_id] = entry.now, work_of(plan)
                case SwapOut(copy_id=copy_id) | SwapIn(copy_id=copy_id):
                    blocks[copy_id] = len(effect.device_blocks)

    with file.open("rb") as opened:
        found = replay(opened, take)
    core = found.core
    if not isinstance(core, InstanceState):
        raise ProtocolError(f"{file} is not the journal of a worker")
    if found.difference is not None:
        raise ProtocolError(f"{file} is of another version of the worker: {found.difference}")
    size = core.config.bytes_per_block
    return Recording(core.times.profile, steps, [(size * num_blocks, seconds) for num_blocks, seconds in swaps])
