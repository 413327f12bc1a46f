"""Drives one InstanceState by hand: the engine's answers are the test's."""

from dataclasses import replace

from actorserve.core.effects import Effect, RunStep, Send
from actorserve.core.instance import InstanceConfig, InstanceState
from actorserve.core.messages import (
    Message,
    Peer,
    RequestSpec,
    SamplingParams,
    Start,
    StepDone,
    StepPlan,
)
from actorserve.core.policy import FirstComeFirstServed

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
)


def spec(name: str, num_prompt: int, max_tokens: int = 4, **sampling: object) -> RequestSpec:
    params = replace(SamplingParams(seed=0, max_tokens=max_tokens), **sampling)  # type: ignore[arg-type]
    return RequestSpec(name, tuple(range(num_prompt)), params)


class Instance:
    """Drives an InstanceState; keeps the plan in flight and what was sent to the gateway."""

    def __init__(self, config: InstanceConfig = CONFIG) -> None:
        self.state = InstanceState(config, FirstComeFirstServed())
        self.plan: StepPlan | None = None
        self.sent: list[Message] = []
        self.effects: list[Effect] = []

    def handle(self, message: Message, now: float = 0.0, sender: Peer = GATEWAY) -> list[Effect]:
        self.effects = self.state.handle(message, now, sender)
        for effect in self.effects:
            if isinstance(effect, RunStep):
                self.plan = effect.plan
            if isinstance(effect, Send):
                self.sent.append(effect.message)
        return self.effects

    def start(self, request: RequestSpec, epoch: int = 1) -> list[Effect]:
        return self.handle(Start(epoch, request))

    def done(self, token: int = 9, now: float = 0.0, duration_s: float = 0.01) -> list[Effect]:
        """The engine answers the plan in flight with the same token for every sampled row."""
        plan = self.plan
        assert plan is not None
        self.plan = None
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
