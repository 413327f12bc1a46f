"""Reads of KV that an iteration still writes: nothing is copied before it is there, by any way."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from actorserve.core.effects import Fetch
from actorserve.core.messages import KVTicket, Peer
from actorserve.wire.trust import Trust
from tests.e2e.server import wait_until
from tests.workers.kv_source import HERE, KEY, KEYS, NUM_BLOCKS, THERE, content, make_pools, ticket_for
from workers.kv.pools import HostBlocks
from workers.kv_transfer.cancellation import Cancellation
from workers.kv_transfer.errors import TransferError
from workers.kv_transfer.transfer import KVTransfer

SOURCE = Peer("there/worker-0", 7)
WAYS = ("shared", "ipc", "tcp-checked", "tcp-keys")
BLOCKS = tuple(range(0, 390, 3))  # more than a chunk, and apart
SKIPPED = 2
STEP = 5
LAYERS = (slice(0, 2), slice(2, 4))
NEW = content(NUM_BLOCKS, 77)


class Pair:
    """A source whose iterations the test plays, and a destination."""

    def __init__(self, way: str, folder: Path) -> None:
        self.pools, self.own = make_pools(), make_pools(10)
        assert isinstance(self.pools.device, HostBlocks)
        assert isinstance(self.own.device, HostBlocks)
        assert self.pools.progress is not None
        self.there, self.here, self.progress = self.pools.device.array, self.own.device.array, self.pools.progress
        self.before = self.here.copy()
        has_keys = way == "tcp-keys"
        bind = "tcp://127.0.0.1:*" if way.startswith("tcp") else f"ipc://{folder}/source.kv"
        self.source = KVTransfer(self.pools, bind, KEY, trust=Trust(THERE, KEYS) if has_keys else None)
        self.destination = KVTransfer(
            self.own, f"ipc://{folder}/destination.kv", KEY, trust=Trust(HERE, KEYS) if has_keys else None
        )
        self.access = self.source.access
        if way != "shared":
            self.access = replace(self.access, shared="", shared_host="")
        if way.startswith("tcp"):
            self.access = replace(self.access, host="another host")

    def write(self, layer: int) -> None:
        """The iteration writes this layer's KV."""
        self.there[:, LAYERS[layer]] = NEW[:, LAYERS[layer]]
        self.progress.report(STEP, layer + 1)

    def has(self, layer: int) -> bool:
        """Whether all of this layer has been copied."""
        pieces = LAYERS[layer]
        return np.array_equal(self.here[list(BLOCKS[SKIPPED:]), pieces], NEW[list(BLOCKS[SKIPPED:]), pieces])

    def is_untouched(self, layer: int) -> bool:
        return np.array_equal(self.here[:, LAYERS[layer]], self.before[:, LAYERS[layer]])

    @contextmanager
    def reading(self, ticket: KVTicket, cancellation: Cancellation | None = None) -> Iterator[list[str]]:
        """While a thread reads. Ends when it has ended; its errors are what is yielded."""
        fetch = Fetch(1, SOURCE, self.access, ticket, SKIPPED, BLOCKS[SKIPPED:], is_urgent=True)
        errors: list[str] = []

        def read() -> None:
            try:
                self.destination.fetch(fetch, cancellation)
            except TransferError as error:
                errors.append(str(error))

        thread = threading.Thread(target=read)
        thread.start()
        try:
            yield errors
        finally:
            thread.join(30.0)
            assert not thread.is_alive()

    def close(self) -> None:
        self.source.close()
        self.destination.close()


@pytest.fixture(params=WAYS)
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Pair]:
    pair = Pair(request.param, tmp_path)
    yield pair
    pair.close()


def test_a_layer_is_copied_once_it_is_written(pair: Pair) -> None:
    """The first layer comes while the second is computed; what no iteration has written does not."""
    pair.progress.end(STEP - 1)
    with pair.reading(ticket_for(BLOCKS, step_id=STEP, by_layer=True)) as errors:
        pair.write(0)
        wait_until(lambda: pair.has(0), "the first layer")
        assert pair.is_untouched(1)
        pair.write(1)
    assert errors == []
    assert pair.has(0)
    assert pair.has(1)
    assert np.array_equal(pair.here[1], pair.before[1]), "other blocks are untouched"


def test_in_one_piece_nothing_is_copied_before_the_iteration_has_ended(pair: Pair) -> None:
    """Then all is copied."""
    with pair.reading(ticket_for(BLOCKS, step_id=STEP)) as errors:
        pair.write(0)
        assert pair.is_untouched(0)
        pair.write(1)
    assert errors == []
    assert pair.has(0)
    assert pair.has(1)


def test_an_iteration_that_has_ended_is_not_waited_for(pair: Pair) -> None:
    """A reader that comes late copies at once, also when later iterations have ended."""
    pair.write(0)
    pair.write(1)
    pair.progress.report(STEP + 3, 1)
    for by_layer in (False, True):
        pair.here[:] = pair.before
        with pair.reading(ticket_for(BLOCKS, step_id=STEP, by_layer=by_layer)) as errors:
            pass
        assert errors == []
        assert pair.has(0)
        assert pair.has(1)


def test_a_read_that_waits_can_be_cancelled(pair: Pair) -> None:
    """After the cancel nothing more is written."""
    cancellation = Cancellation()
    with pair.reading(ticket_for(BLOCKS, step_id=STEP, by_layer=True), cancellation) as errors:
        pair.write(0)
        wait_until(lambda: pair.has(0), "the first layer")
        cancellation.cancel("not wanted")
    pair.write(1)
    assert errors == ["not wanted"]
    assert pair.is_untouched(1)


def test_a_read_that_waits_delays_no_other(pair: Pair) -> None:
    """Other reads from the same source, urgent ones too, go on meanwhile."""
    with pair.reading(ticket_for(BLOCKS, step_id=STEP, by_layer=True)):
        pair.write(0)
        wait_until(lambda: pair.has(0), "the first layer")
        pair.there[1] = NEW[1]
        pair.destination.fetch(Fetch(2, SOURCE, pair.access, ticket_for((1,)), 0, (1,), is_urgent=True))
        assert np.array_equal(pair.here[1], NEW[1])
        pair.write(1)


def test_a_source_without_progress_is_not_followed(pair: Pair) -> None:
    """A ticket that names an iteration is refused where the progress of iterations is not known."""
    pair.source.close()
    other = KVTransfer(replace(pair.pools, progress=None), "tcp://127.0.0.1:*", KEY)
    pair.access = replace(other.access, host="another host" if pair.access.host == "another host" else pair.access.host)
    pair.destination.close()
    pair.destination = KVTransfer(pair.own, "tcp://127.0.0.1:*", KEY)
    with pair.reading(ticket_for(BLOCKS, step_id=STEP)) as errors:
        pass
    other.close()
    [error] = errors
    assert "progress" in error or "memory" in error
    assert pair.is_untouched(0)
