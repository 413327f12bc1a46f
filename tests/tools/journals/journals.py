"""Journals of workers whose iterations take given times."""

from collections.abc import Callable
from pathlib import Path

from actorserve.core.effects import Effect, RunStep
from actorserve.core.instance.config import InstanceConfig
from actorserve.core.instance.state import InstanceState
from actorserve.core.messages import (
    Message,
    Peer,
    PeerUp,
    RequestSpec,
    Role,
    SamplingParams,
    Start,
    StepDone,
    StepPlan,
)
from actorserve.core.recipes import InstanceRecipe
from actorserve.core.replay import make_instance_core
from actorserve.core.timing.profile import Profile
from actorserve.wire.journal import Entry, write_effects, write_entry, write_recipe
from actorserve.wire.recipes import recipe_text
from tools.journals.steps import Work, work_of

GATEWAY = Peer("gateway-0", 1)


def write_journal(
    file: Path, profile: Profile, prompts: list[int], num_output: int, times_s: Callable[[Work], tuple[float, float]]
) -> list[StepPlan]:
    """The journal of a worker that gets prompts of these lengths at once. ``times_s`` gives the pause before an
    iteration, and its duration. Returns the iterations' plans.
    """
    config = InstanceConfig(
        num_blocks=400,
        tokens_per_block=16,
        bytes_per_block=16 * profile.kv_bytes_per_token,
        max_context_tokens=640,
        max_batch_requests=16,
        max_batch_tokens=64,
        run_ahead=False,
    )
    recipe = InstanceRecipe(config, profile, "fcfs")
    core = make_instance_core(recipe)
    assert isinstance(core, InstanceState)
    plans: list[StepPlan] = []
    with file.open("wb") as opened:
        write_recipe(opened, recipe_text(recipe))

        def hear(message: Message, now: float, sender: Peer | None = None) -> StepPlan | None:
            write_entry(opened, Entry(now, sender, message))
            effects: list[Effect] = core.handle(message, now, sender)
            write_effects(opened, effects)
            return next((effect.plan for effect in effects if isinstance(effect, RunStep)), None)

        now = 100.0
        hear(PeerUp(GATEWAY, Role.GATEWAY), now)
        plan = None
        for number, length in enumerate(prompts):
            spec = RequestSpec(
                f"r{number}", tuple(range(number, number + length)), SamplingParams(seed=0, max_tokens=num_output)
            )
            plan = hear(Start(1, spec), now, GATEWAY) or plan
        num_prompt = {f"r{number}": length for number, length in enumerate(prompts)}
        while plan is not None:
            plans.append(plan)
            pause_s, duration_s = times_s(work_of(plan))
            now += pause_s + duration_s
            rows = [
                (request_id, start + len(fed) - num_prompt[request_id])
                for request_id, start, fed, samples in zip(
                    plan.request_ids, plan.starts, plan.token_ids, plan.samples, strict=True
                )
                if samples
            ]
            request_ids, positions = zip(*rows, strict=True) if rows else ((), ())
            plan = hear(StepDone(plan.step_id, duration_s, request_ids, positions, (7,) * len(rows)), now)
    return plans
