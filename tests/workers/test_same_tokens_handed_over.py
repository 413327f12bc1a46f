"""The same tokens after a handoff: the last chunk's KV is copied while a real engine computes it, bit for bit."""

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actorserve.core.effects import Fetch
from actorserve.core.messages import (
    Attained,
    CopyDone,
    HandOver,
    ModelInfo,
    PeerUp,
    Release,
    RequestSpec,
    Role,
    SamplingParams,
    Start,
    StepPlan,
    Transfer,
    WorkerInfo,
)
from actorserve.core.migration.config import LayerCopies, MigrationConfig
from tests.workers.real_instance import Instance, answer_alone, config
from tests.workers.two_engines import KEY, PEERS, two_engines
from tests.workers.workloads import VOCAB_SIZE, CopyPace
from workers.kv_transfer.transfer import KVTransfer

CHUNK = 24
SPEC = RequestSpec("r", tuple(range(3, 3 + 2 * CHUNK - 5)), SamplingParams(seed=1, max_tokens=6))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("way", [LayerCopies.ALWAYS, LayerCopies.NEVER])
def test_a_chunk_that_is_copied_while_it_is_computed(
    make_model: Any, tmp_path: Path, dtype: str, way: LayerCopies
) -> None:
    """The destination has the source's bits of every layer, and continues with the tokens of a request alone."""
    with two_engines(make_model(vocab_size=VOCAB_SIZE).description, tmp_path, dtype, 256) as (engines, transfers):
        alone = answer_alone(engines[0], SPEC)
        instances = []
        for engine in engines:
            assert engine.kv.progress is not None
            engine.kv.progress.restart()
            migration = MigrationConfig(ticket_key=KEY.hex(), num_layers=engine.kv.num_layers, layer_copies=way)
            cut = config(engine, migration=migration, max_batch_tokens=CHUNK)
            instances.append(Instance(cut, engine, paces=(CopyPace(early=True, num_steps=0),)))
            instances[-1].answers = instances[0].answers
        for index, instance in enumerate(instances):
            access = transfers[1 - index].access
            instance.tell(PeerUp(PEERS[1 - index], Role.WORKER, WorkerInfo("k", ModelInfo("m", 100, 1000), kv=access)))
        source, destination = instances
        source.tell(Start(1, SPEC, Attained(), None, PEERS[1]))
        followed: list[Fetch] = []
        asked: HandOver | None = None
        while asked is None:
            asked = _exchange(source, destination)
            reads = [_read(transfers[1], copy.effect) for copy in destination.fetches if isinstance(copy.effect, Fetch)]
            if source.state.requests["r"].num_output == 0:
                source.step(0.01)
            for thread, fetch in reads:
                thread.join()
                followed += [fetch] if fetch.ticket.step_id else []
                destination.tell(CopyDone(fetch.copy_id, 0.001))
            destination.fetches.clear()
        [fetch] = followed
        assert fetch.ticket.by_layer == (way is LayerCopies.ALWAYS)
        assert np.array_equal(_bits(engines[0].kv, fetch.ticket.blocks), _bits(engines[1].kv, fetch.blocks))
        source.tell(Release("r", 1))
        token_ids = tuple(token for token, *_ in source.answers["r"])
        spec = RequestSpec("r", SPEC.prompt_token_ids, SPEC.sampling, token_ids)
        assert asked.transfer is not None
        destination.tell(Start(2, spec, asked.attained, Transfer(PEERS[0], asked.transfer)))
        assert destination.state.requests["r"].num_computed == len(SPEC.prompt_token_ids)
        while "r" not in destination.ended:
            destination.step(0.01)
        assert source.answers["r"] == alone


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_a_layer_is_reported_once_its_kv_is_written(make_model: Any, tmp_path: Path, dtype: str) -> None:
    """When an iteration reports a layer, the KV of all layers up to it is that of the iteration's end, and that of no
    later layer is.
    """
    with two_engines(make_model(vocab_size=VOCAB_SIZE).description, tmp_path, dtype, 256) as ((engine, _), _):
        progress, kv = engine.kv.progress, engine.kv
        assert progress is not None
        seen: list[tuple[int, int, Any]] = []
        report = progress.report

        def reported(step_id: int, num_layers: int) -> None:
            seen.append((step_id, num_layers, _bits(kv, (2, 0))))
            report(step_id, num_layers)

        progress.report = reported  # type: ignore[method-assign]
        engine.add(SPEC)
        token_ids = SPEC.prompt_token_ids[: 2 * engine.tokens_per_block]
        engine.begin(StepPlan(7, ("r",), (0,), (token_ids,), ((2, 0),), (True,))).result()
        assert [(step_id, num_layers) for step_id, num_layers, _ in seen] == [
            (7, number + 1) for number in range(kv.num_layers)
        ]
        pieces, last = kv.shape[0] // kv.num_layers, _bits(kv, (2, 0))
        for _, num_layers, bits in seen:
            end = num_layers * pieces
            assert np.array_equal(bits[:, :end], last[:, :end])
            assert num_layers == kv.num_layers or not np.array_equal(bits[:, end:], last[:, end:])


def _exchange(source: Instance, destination: Instance) -> HandOver | None:
    """Deliver the messages between the two. Returns what the gateway is asked."""
    asked = None
    while source.outbox or destination.outbox:
        for sender, to in ((0, 1), (1, 0)):
            instance = (source, destination)[sender]
            sent, instance.outbox = instance.outbox, []
            for _, message in sent:
                if isinstance(message, HandOver):
                    asked = message
                else:
                    (source, destination)[to].tell(message, PEERS[sender])
    return asked


def _read(transfer: KVTransfer, fetch: Fetch) -> tuple[threading.Thread, Fetch]:
    thread = threading.Thread(target=transfer.fetch, args=(fetch,))
    thread.start()
    return thread, fetch


def _bits(kv: Any, blocks: tuple[int, ...]) -> Any:
    out = np.empty((len(blocks), *kv.shape), dtype=np.uint8)
    kv.device.read(blocks, out)
    return out
