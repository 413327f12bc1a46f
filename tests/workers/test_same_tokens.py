"""The same tokens: whatever the scheduler does, a request gets bit for bit the tokens that it gets alone."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings

from actorserve.core.kv.layer_groups import ONE_GROUP, LayerGroups
from actorserve.core.messages import Release, RequestSpec, Start
from actorserve.core.scheduling.swapping import SwapMode
from tests.workers.conftest import SmallModel
from tests.workers.real_instance import Answer, Instance, answer_alone, config
from tests.workers.workloads import BUSY, MAX_STEPS, NUM_HOST_BLOCKS, TOKENS_PER_BLOCK, VOCAB_SIZE, WORKLOADS, Workload
from workers.engine import Engine
from workers.engine_options import EngineOptions
from workers.engines.torch_engine import TorchEngine


def play(engine: Engine, workload: Workload, seen: Counter[object]) -> Instance:
    """Serve the workload, and count its events (preemptions, swaps, prefix hits) in ``seen``."""
    changes = workload.changes(engine.layer_groups.num_groups)
    instance = Instance(config(engine, prefix_cache=True, **changes), engine, workload.policy, workload.copies)
    left: set[str] = set()
    step = 0
    last_step = max(client.asks_at_step for client in workload.clients)
    while step <= last_step or instance.state.requests or instance.is_copying:
        for client, spec in zip(workload.clients, workload.specs, strict=True):
            if client.asks_at_step == step:
                instance.tell(Start(1, spec))
            if client.asks_at_step + client.patience_steps == step and spec.request_id not in instance.ended:
                instance.tell(Release(spec.request_id, 1))
                left.add(spec.request_id)
        instance.step(workload.durations_s[step % len(workload.durations_s)])
        step += 1
        assert step < MAX_STEPS, "the instance makes no progress"
    assert instance.ended | left == {spec.request_id for spec in workload.specs}
    assert instance.state.memory.device.num_free_blocks == changes["num_blocks"]
    assert instance.state.memory.host.num_free_blocks == changes["num_host_blocks"]
    seen["preemptions"] += instance.state.batcher.num_preemptions
    seen["tokens found"] += instance.state.memory.prefixes.num_tokens_found
    seen["left"] += len(left)
    seen["swap outs", workload.swap_mode] += instance.state.memory.num_swap_outs
    return instance


@pytest.mark.parametrize(
    ("dtype", "is_windowed"),
    [("float32", False), ("bfloat16", False), ("int8", False), ("int4", False), ("float32", True), ("bfloat16", True)],
)
def test_scheduling_changes_no_token(
    make_model: Any, windowed_model: SmallModel, dtype: str, is_windowed: bool
) -> None:
    """Arrivals, chunks, preemptions, swaps and prefix hits change neither a request's tokens nor log-probabilities,
    also if most layers keep the KV of a window alone.
    """
    model = windowed_model if is_windowed else make_model(vocab_size=VOCAB_SIZE)
    token_bytes = 3 * 512 if is_windowed else 256  # a token's KV in float32; others need half of it
    engine = TorchEngine(
        model.description,
        EngineOptions(
            dtype=dtype,
            tokens_per_block=TOKENS_PER_BLOCK,
            kv_cache_bytes=4 * 2**20,
            host_kv_bytes=NUM_HOST_BLOCKS * TOKENS_PER_BLOCK * token_bytes,
        ),
    )
    assert engine.layer_groups == (LayerGroups(1, 2, 12) if is_windowed else ONE_GROUP)
    alone: dict[RequestSpec, Answer] = {}
    seen: Counter[object] = Counter()

    @settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @example(BUSY)
    @example(replace(BUSY, swap_mode=SwapMode.REACTIVE))
    @given(WORKLOADS)
    def same(workload: Workload) -> None:
        instance = play(engine, workload, seen)
        for spec in workload.specs:
            key = replace(spec, request_id="alone", cache_salt="")
            if key not in alone:
                alone[key] = answer_alone(engine, key)
            answer = instance.answers.get(spec.request_id, [])
            assert answer == alone[key][: len(answer)]
            if spec.request_id in instance.ended:
                assert len(answer) == spec.sampling.max_tokens
                seen["scored prompts"] += answer[0][2] is not None

    same()
    swaps = [("swap outs", mode) for mode in (SwapMode.PROACTIVE, SwapMode.REACTIVE)]
    assert all(seen[what] > 0 for what in ("preemptions", "tokens found", "left", "scored prompts", *swaps)), seen
    assert not seen["swap outs", SwapMode.RECOMPUTE]
