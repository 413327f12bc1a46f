"""Splitwise's machine schedulers (section 4.3), as instances of each role do their part with the production policy.

What prompt instances do is in ``test_token_budget``, and what whole prompts change in ``test_whole_prompts``.
"""

from dataclasses import replace
from itertools import pairwise

import pytest

from actorserve.core.effects import Send, SwapOut
from actorserve.core.messages import Attained, Copied, HandOver, InstanceRole, PeerUp, Role, Start
from actorserve.core.scheduling.mlfq import SkipJoinMLFQ
from actorserve.core.timing.step_times import StepTimes
from tests.core.harness.driver import GATEWAY, PROFILE, Instance, migration_id, spec
from tests.core.harness.source import INFO, SOURCE, D

STEP_S = 0.01  # an iteration of decodes, and so the first quantum


def instance(role: InstanceRole, promote_after_s: float = 1.0, **changes: object) -> Instance:
    """An instance with the skip-join queue."""
    times = StepTimes(PROFILE)
    config = replace(SOURCE, role=role, **changes)  # type: ignore[arg-type]
    return Instance(config, SkipJoinMLFQ(times, promote_after_s=promote_after_s), times)


def batch(found: Instance) -> list[str]:
    """The requests in the iteration that runs."""
    assert found.plan is not None
    return list(found.plan.request_ids)


def test_a_request_reaches_the_token_instance_in_the_level_of_its_decodes() -> None:
    """Its long prompt has joined a low level on the prompt instance, but only decodes count on the token instance."""
    found = instance(InstanceRole.PROMPT)
    found.handle(PeerUp(D, Role.WORKER, INFO))
    found.handle(Start(1, spec("r", 40, 100), Attained(), None, D), 0.0, GATEWAY)
    assert found.state.policy.attained(found.state.requests["r"], 0.0).quantum_s >= 5 * STEP_S
    found.handle(Copied(migration_id(), 0), 0.0, D)
    found.done()
    effects = found.handle(Copied(migration_id(), 1), 0.0, D)
    (attained,) = [
        effect.message.attained
        for effect in effects
        if isinstance(effect, Send) and isinstance(effect.message, HandOver)
    ]
    assert attained.quantum_s == pytest.approx(STEP_S)
    assert attained.quantum_used_s == 0.0


def test_a_token_instance_batches_until_memory_is_full_and_then_by_attained_service() -> None:
    """Three requests that decode fit at first. When they have grown, the one with the most service leaves its memory to
    the others, and lies on the host.
    """
    found = instance(InstanceRole.TOKEN, num_blocks=8, num_host_blocks=16, max_context_tokens=32, prefix_cache=False)
    for name, num_quanta in (("old", 8), ("young", 1), ("middle", 2)):
        attained = Attained(num_quanta * STEP_S, num_quanta * STEP_S)
        found.handle(Start(1, spec(name, 7, 20), attained), 0.0, GATEWAY)
    found.done()
    assert sorted(batch(found)) == ["middle", "old", "young"]
    now = 0.0
    while not found.copies:
        now += STEP_S
        found.done(now=now)
    assert isinstance(found.copies[0], SwapOut)
    found.copied(now)
    found.done(now=now)
    assert sorted(batch(found)) == ["middle", "young"]
    assert not found.state.requests["old"].blocks


def test_a_decode_that_prompts_keep_out_of_a_mixed_instance_gets_its_turn() -> None:
    """New prompts fill each iteration, and go before a request that has decoded for long. But it is promoted when it
    has waited for ``promote_after_s``, and waits for little longer, because one request is promoted at a time.
    """
    promote_after_s = 0.5
    found = instance(InstanceRole.MIXED, promote_after_s, max_batch_requests=2, max_batch_tokens=64, prefix_cache=False)
    attained = Attained(100 * STEP_S, 64 * STEP_S)
    found.handle(Start(1, spec("decodes", 5, 150), attained), 0.0, GATEWAY)
    served_s = [0.0]
    now = 0.0
    for number in range(300):
        while len(found.state.requests) < 6:
            found.handle(Start(1, spec(f"prompt{number}-{len(found.state.requests)}", 8, 1), Attained()), now, GATEWAY)
        now += STEP_S
        found.done(now=now, duration_s=STEP_S)
        if "decodes" in batch(found):
            served_s.append(now)
    waits_s = [later - earlier for earlier, later in pairwise(served_s)]
    assert 0.9 * promote_after_s < max(waits_s) < 1.2 * promote_after_s
    assert len(waits_s) >= 4
