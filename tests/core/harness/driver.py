"""Drives one InstanceState by hand: the test answers for the engine."""

from dataclasses import replace
from math import inf

from actorserve.core.effects import Effect, RunStep, Send, SwapIn, SwapOut
from actorserve.core.instance.config import InstanceConfig
from actorserve.core.instance.state import InstanceState
from actorserve.core.instance.steps import Step
from actorserve.core.messages import (
    CopyDone,
    Message,
    Peer,
    RequestSpec,
    SamplingParams,
    Start,
    StepDone,
    StepPlan,
    Tick,
    TransferId,
    TransferKind,
)
from actorserve.core.scheduling.policy import FirstComeFirstServed, SchedulingPolicy
from actorserve.core.timing.profile import Curve, Link, Profile
from actorserve.core.timing.step_times import StepTimes

GATEWAY = Peer("gateway-0", 1)
CONFIG = InstanceConfig(
    num_blocks=8,
    tokens_per_block=4,
    bytes_per_block=100,
    max_context_tokens=32,
    max_batch_requests=4,
    max_batch_tokens=8,
    load_report_s=0.5,
    retry_s=1.0,
    tpot_target_s=inf,
    run_ahead=False,  # so that a test reads like the iterations that it describes; test_run_ahead.py runs ahead
)


PROFILE = Profile(
    name="driven by hand",
    model="none",
    hardware="none",
    prefill=Curve((1, 1001), (0.01, 1.01)),
    prefill_context_s=0.0,
    decode=Curve((1,), (0.01,)),
    decode_context=Curve((0,), (0.0,)),
    swap=Link(0.0, 1e9),
    transfer=Link(0.0, 1e9),
    kv_bytes_per_token=25,
)
"""An iteration takes 10 ms, and 1 ms more for each prefill token."""


def spec(name: str, num_prompt: int, max_tokens: int = 4, **sampling: object) -> RequestSpec:
    params = replace(SamplingParams(seed=0, max_tokens=max_tokens), **sampling)  # type: ignore[arg-type]
    return RequestSpec(name, tuple(range(num_prompt)), params)


def migration_id(number: int = 1) -> TransferId:
    return TransferId(TransferKind.MIGRATION, number)


def checkpoint_id(number: int = 1) -> TransferId:
    return TransferId(TransferKind.CHECKPOINT, number)


def plan_of(step: Step) -> StepPlan:
    """The plan of an iteration in flight, with other tokens."""
    rows = step.batch.rows
    return StepPlan(
        step_id=step.step_id,
        request_ids=tuple([request.request_id for request, _ in rows]),
        starts=tuple(step.starts),
        token_ids=tuple([(0,) * num_fed for _, num_fed in rows]),
        block_tables=tuple([tuple(blocks) for blocks in step.blocks]),
        samples=tuple(step.samples),
    )


class Instance:
    """Drives an InstanceState; keeps the plans in flight and what was sent to the gateway."""

    def __init__(
        self,
        config: InstanceConfig = CONFIG,
        policy: SchedulingPolicy | None = None,
        times: StepTimes | None = None,
    ) -> None:
        """``policy`` uses the same ``times``."""
        self.state = InstanceState(
            config, FirstComeFirstServed() if policy is None else policy, times or StepTimes(PROFILE)
        )
        self.plan: StepPlan | None = None  # the oldest in flight
        self.next_plan: StepPlan | None = None  # planned while that one is in flight
        self.sent: list[Message] = []
        self.effects: list[Effect] = []
        self.copies: list[SwapOut | SwapIn] = []  # in flight

    def handle(self, message: Message, now: float = 0.0, sender: Peer = GATEWAY) -> list[Effect]:
        if isinstance(message, StepDone):
            self.plan, self.next_plan = self.next_plan, None
        return self._take(self.state.handle(message, now, sender))

    def plan_ahead(self, until_s: float = inf) -> list[Effect]:
        """The next iteration is planned while one is in flight, if that is due before ``until_s``."""
        at_s = self.state.steps.next_plan_s
        return self.handle(Tick(), at_s) if at_s is not None and at_s < until_s else []

    def advance(self, ends: list[tuple[float, float]], token: int) -> list[Effect]:
        """Quiet steps end, each at (now, duration)."""
        effects = self.state.quiet_steps.advance(ends, token) + self.state.quiet_steps.stop()
        (step,) = self.state.steps.in_flight
        self.plan = plan_of(step)
        return self._take(effects)

    def _take(self, effects: list[Effect]) -> list[Effect]:
        self.state.validate()
        self.effects = effects
        for effect in self.effects:
            if isinstance(effect, RunStep) and self.plan is None:
                self.plan = effect.plan
            elif isinstance(effect, RunStep):
                assert self.next_plan is None
                self.next_plan = effect.plan
            if isinstance(effect, SwapOut | SwapIn):
                self.copies.append(effect)
            if isinstance(effect, Send):
                self.sent.append(effect.message)
        return self.effects

    def start(self, request: RequestSpec, epoch: int = 1) -> list[Effect]:
        return self.handle(Start(epoch, request))

    def copied(self, now: float = 0.0, duration_s: float = 0.001) -> list[Effect]:
        """The engine completes its oldest swap."""
        return self.handle(CopyDone(self.copies.pop(0).copy_id, duration_s), now)

    def done(self, token: int = 9, now: float = 0.0, duration_s: float = 0.01) -> list[Effect]:
        """The engine answers the oldest plan in flight with the same token for every sampled row."""
        plan = self.plan
        assert plan is not None
        rows = [row for row, samples in enumerate(plan.samples) if samples]
        prompts = {r.request_id: len(r.spec.prompt_token_ids) for r in self.state.requests.values()}
        ids = tuple(plan.request_ids[row] for row in rows)
        return self.handle(
            StepDone(
                plan.step_id,
                duration_s,
                ids,
                tuple(
                    plan.starts[row] + len(plan.token_ids[row]) - prompts.get(plan.request_ids[row], 0) for row in rows
                ),
                (token,) * len(rows),
            ),
            now,
        )
