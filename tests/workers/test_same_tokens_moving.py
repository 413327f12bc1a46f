"""The same tokens anywhere: requests that move between two real engines get bit for bit the tokens they get alone."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings, strategies as st

from actorserve.core.messages import (
    HandOver,
    MigrateTo,
    ModelInfo,
    Offer,
    Peer,
    PeerUp,
    Release,
    RequestSpec,
    Role,
    Start,
    Transfer,
    WorkerInfo,
)
from actorserve.core.migration.config import MigrationConfig, MigrationMode
from tests.workers.conftest import SmallModel
from tests.workers.real_instance import Answer, Instance, answer_alone, config
from tests.workers.two_engines import KEY, PEERS, two_engines
from tests.workers.workloads import BUSY, MAX_STEPS, VOCAB_SIZE, WORKLOADS, Workload
from workers.engine import Engine
from workers.kv_transfer.transfer import KVTransfer

COORDINATOR = Peer("coordinator", 1)


@dataclass(frozen=True)
class Move:
    """An order at a step: worker ``source`` migrates requests of so many blocks of KV to the other worker."""

    at_step: int
    source: int
    num_blocks: int


MOVES = st.lists(
    st.builds(Move, st.integers(0, 60), st.integers(0, 1), st.sampled_from([3, 8, 1000])), min_size=1, max_size=20
).map(tuple)
ALL_THE_TIME = tuple(Move(step, step // 3 % 2, 8) for step in range(0, 120, 3))


class Pair:
    """Two instances with engines of one model, between which requests move; the test is their gateway."""

    def __init__(self, engines: Sequence[Engine], transfers: Sequence[KVTransfer]) -> None:
        self.instances: list[Instance] = []
        self._engines, self._transfers = engines, transfers
        self._specs: dict[str, RequestSpec] = {}
        self._owners: dict[str, tuple[int, int]] = {}  # of each request: index of the instance, and epoch
        self.answers: dict[str, Answer] = {}
        self.seen: Counter[str] = Counter()

    def begin(self, workload: Workload, mode: MigrationMode) -> None:
        changes = workload.changes(self._engines[0].layer_groups.num_groups)
        migration = MigrationConfig(mode, KEY.hex())
        for engine, transfer in zip(self._engines, self._transfers, strict=True):
            cut = config(engine, prefix_cache=True, migration=migration, **changes)
            instance = Instance(cut, engine, workload.policy, workload.copies, transfer)
            instance.answers = self.answers
            self.instances.append(instance)
        for index, instance in enumerate(self.instances):
            other = 1 - index
            instance.tell(
                PeerUp(
                    PEERS[other],
                    Role.WORKER,
                    WorkerInfo("k", ModelInfo("m", 100, 1000), kv=self._transfers[other].access),
                )
            )

    @property
    def is_busy(self) -> bool:
        return any(
            instance.state.requests
            or instance.is_copying
            or instance.fetches
            or instance.outbox
            or instance.state.migration_destination
            for instance in self.instances
        )

    @property
    def ended(self) -> set[str]:
        return self.instances[0].ended | self.instances[1].ended

    def start(self, spec: RequestSpec, index: int) -> None:
        self._specs[spec.request_id] = spec
        self._owners[spec.request_id] = (index, 1)
        self.instances[index].tell(Start(1, spec))

    def release(self, request_id: str) -> None:
        index, epoch = self._owners.pop(request_id)
        self.instances[index].tell(Release(request_id, epoch))

    def move(self, move: Move) -> None:
        engine = self._engines[0]
        num_bytes = move.num_blocks * engine.bytes_per_block * engine.layer_groups.num_groups
        self.instances[move.source].tell(MigrateTo(PEERS[1 - move.source], num_bytes, 1.0), COORDINATOR)

    def step(self, duration_s: float) -> None:
        for index, instance in enumerate(self.instances):
            sent, instance.outbox = instance.outbox, []
            for to, message in sent:
                if isinstance(message, Offer):
                    self.seen["from the host's pool"] += message.ticket.on_host
                if isinstance(message, HandOver):
                    self._commit(index, message)
                else:
                    self.instances[PEERS.index(to)].tell(message, PEERS[index])
        for instance in self.instances:
            instance.step(duration_s)
            self.seen["blocks skipped"] += instance.fetch()

    def _commit(self, index: int, asked: HandOver) -> None:
        request_id = asked.request_id
        self.instances[index].tell(Release(request_id, asked.epoch))
        if self._owners.get(request_id) != (index, asked.epoch):
            return  # its client has left
        answer = self.answers.get(request_id, [])
        assert asked.num_output_tokens == len(answer)
        spec = replace(self._specs[request_id], output_token_ids=tuple(token for token, *_ in answer))
        other = PEERS.index(asked.to)
        self._owners[request_id] = (other, asked.epoch + 1)
        transfer = None if asked.transfer is None else Transfer(PEERS[index], asked.transfer)
        self.instances[other].tell(Start(asked.epoch + 1, spec, asked.attained, transfer))
        moved = self.instances[other].state.requests.get(request_id)
        has_kv = moved is not None and bool(moved.blocks)
        self.seen["with KV" if has_kv and transfer else "anew" if transfer else "waiting"] += 1


def play_moving(pair: Pair, workload: Workload, moves: Sequence[Move], seen: Counter[object]) -> None:
    """Serve the workload on both instances, and make its requests move."""
    left: set[str] = set()
    step = 0
    last_step = max(client.asks_at_step for client in workload.clients)
    while step <= last_step or pair.is_busy:
        for number, (client, spec) in enumerate(zip(workload.clients, workload.specs, strict=True)):
            if client.asks_at_step == step:
                pair.start(spec, number % 2)
            if client.asks_at_step + client.patience_steps == step and spec.request_id not in pair.ended:
                pair.release(spec.request_id)
                left.add(spec.request_id)
        for move in moves:
            if move.at_step == step:
                pair.move(move)
        pair.step(workload.durations_s[step % len(workload.durations_s)])
        step += 1
        assert step < MAX_STEPS, "the pair makes no progress"
    assert pair.ended | left == {spec.request_id for spec in workload.specs}
    for instance in pair.instances:
        sizes = instance.state.config
        assert instance.state.memory.device.num_free_blocks == sizes.num_blocks
        assert instance.state.memory.host.num_free_blocks == sizes.num_host_blocks
        seen["preemptions"] += instance.state.batcher.num_preemptions
        seen["tokens found"] += instance.state.memory.prefixes.num_tokens_found
        seen["swap outs"] += instance.state.memory.num_swap_outs
    seen["left"] += len(left)
    seen.update(pair.seen)


@pytest.mark.parametrize(
    ("dtype", "is_windowed"),
    [("float32", False), ("bfloat16", False), ("int8", False), ("int4", False), ("float32", True)],
)
def test_moving_changes_no_token(
    make_model: Any, windowed_model: SmallModel, tmp_path: Path, dtype: str, is_windowed: bool
) -> None:
    """A request that moves back and forth between two engines, at any steps, gets the tokens that it gets alone, also
    if most layers keep the KV of a window alone.
    """
    model = windowed_model if is_windowed else make_model(vocab_size=VOCAB_SIZE)
    token_bytes = 3 * 512 if is_windowed else 256  # a token's KV in float32; others need half of it
    alone: dict[RequestSpec, Answer] = {}
    seen: Counter[object] = Counter()
    with two_engines(model.description, tmp_path, dtype, token_bytes) as (engines, transfers):

        @settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow])
        @example(BUSY, ALL_THE_TIME, MigrationMode.LIVE)
        @example(BUSY, ALL_THE_TIME, MigrationMode.BLOCKING)
        @example(replace(BUSY, num_spare_blocks=20), ALL_THE_TIME, MigrationMode.LIVE)
        @given(WORKLOADS, MOVES, st.sampled_from([MigrationMode.LIVE, MigrationMode.LIVE, *MigrationMode]))
        def same(workload: Workload, moves: tuple[Move, ...], mode: MigrationMode) -> None:
            pair = Pair(engines, transfers)
            pair.begin(workload, mode)
            play_moving(pair, workload, moves, seen)
            for spec in workload.specs:
                key = replace(spec, request_id="alone", cache_salt="")
                if key not in alone:
                    alone[key] = answer_alone(engines[0], key)
                answer = pair.answers.get(spec.request_id, [])
                assert answer == alone[key][: len(answer)]
                if spec.request_id in pair.ended:
                    assert len(answer) == spec.sampling.max_tokens

        same()
    moves = ("with KV", "waiting", "from the host's pool", "blocks skipped")
    assert all(seen[what] > 0 for what in (*moves, "preemptions", "swap outs", "tokens found")), seen
