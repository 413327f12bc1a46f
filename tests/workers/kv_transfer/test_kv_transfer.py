"""The contract that every way of reading another process's KV keeps."""

import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from actorserve.core.effects import Fetch
from actorserve.core.messages import KVAccess, KVTicket, Peer
from actorserve.wire.trust import Trust
from tests.workers.kv_source import (
    HERE,
    KEY,
    KEYS,
    NUM_BLOCKS,
    NUM_HOST_BLOCKS,
    content,
    held,
    make_pools,
    source_process,
    ticket_for,
)
from workers.kv_transfer.cancellation import Cancellation
from workers.kv_transfer.errors import TransferError
from workers.kv_transfer.pacing import Rate
from workers.kv_transfer.transfer import KVTransfer

SOURCE = Peer("there/worker-0", 7)
PATIENCE_S = 1.0
OTHER_SEED = 10  # of the destination's initial KV
SENT = ("ipc", "tcp", "tcp-checked", "tcp-keys")

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@dataclass
class Pair:
    """A source in a process of its own, and the ``kind`` of link that reads it."""

    kind: str
    access: KVAccess
    process: "subprocess.Popen[str]"
    folder: Path

    def destination(
        self, bytes_per_s: float | None = None, sleep: Callable[[float], None] = lambda _: None
    ) -> KVTransfer:
        """A destination with ``make_pools(OTHER_SEED)``, which are its ``pools``."""
        self.pools = make_pools(OTHER_SEED, "cuda" if self.kind == "cuda" else "cpu")
        return KVTransfer(
            self.pools,
            f"ipc://{self.folder}/destination.kv",
            b"another key",
            rate=Rate(bytes_per_s, clock=lambda: 0.0, sleep=sleep),
            patience_s=PATIENCE_S,
            trust=Trust(HERE, KEYS) if self.kind == "tcp-keys" else None,
        )

    def fetch(
        self,
        ticket: KVTicket,
        blocks: Sequence[int],
        num_skipped: int = 0,
        is_urgent: bool = False,
        into_host: bool = False,
    ) -> Fetch:
        return Fetch(1, SOURCE, self.access, ticket, num_skipped, tuple(blocks), is_urgent, into_host)


KINDS = [
    "shared",
    *SENT,
    pytest.param("cuda", marks=[pytest.mark.gpu, needs_cuda]),
]


@contextmanager
def source_of(kind: str, folder: Path) -> Iterator[tuple[KVAccess, "subprocess.Popen[str]"]]:
    bind = "tcp://127.0.0.1:*" if kind.startswith("tcp") else f"ipc://{folder}/source.kv"
    device = "cuda" if kind == "cuda" else "cpu"
    with source_process(bind, device, keys=kind == "tcp-keys") as (access, process):
        if kind in SENT:
            access = replace(access, shared="", shared_host="")
        if kind == "tcp-checked":
            access = replace(access, host="another host")
        yield access, process


@pytest.fixture(scope="module", params=KINDS)
def lasting_source(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, KVAccess, "subprocess.Popen[str]"]]:
    with source_of(request.param, tmp_path_factory.mktemp("source")) as (access, process):
        yield request.param, access, process


@pytest.fixture
def pair(lasting_source: tuple[str, KVAccess, "subprocess.Popen[str]"], tmp_path: Path) -> Pair:
    """A pair whose source other tests use, too."""
    kind, access, process = lasting_source
    return Pair(kind, access, process, tmp_path)


@pytest.fixture(params=KINDS)
def mortal_pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Pair]:
    """A pair whose source the test may kill."""
    with source_of(request.param, tmp_path) as (access, process):
        yield Pair(request.param, access, process, tmp_path)


@pytest.mark.parametrize("lasting_source", SENT, indirect=True)
def test_a_pair_is_what_it_is_called(pair: Pair) -> None:
    """Pairs that send have no memory to map, and pairs on different hosts check what arrives."""
    assert not pair.access.shared
    assert pair.access.address.startswith("tcp://" if pair.kind.startswith("tcp") else "ipc://")


def expect(pair: Pair, blocks: Sequence[int], arrived: np.ndarray) -> None:
    """``blocks`` hold the bytes that arrived, and all other blocks their initial bytes."""
    expected = content(NUM_BLOCKS, OTHER_SEED)
    expected[list(blocks)] = arrived
    assert np.array_equal(held(pair.pools), expected)


@pytest.mark.parametrize("is_urgent", [False, True])
def test_blocks_arrive_as_they_are(pair: Pair, is_urgent: bool) -> None:
    """Runs of neighbours and single blocks, in many chunks, arrive in order in their blocks, and nowhere else."""
    generator = np.random.default_rng(3)
    source_blocks = [*range(100, 230), *generator.permutation(100).tolist(), 399]
    blocks = [*range(17, 147), *(150 + generator.permutation(101)).tolist()]
    destination = pair.destination()
    destination.fetch(pair.fetch(ticket_for(source_blocks), blocks, is_urgent=is_urgent))
    destination.close()
    expect(pair, blocks, content(NUM_BLOCKS, 0)[source_blocks])


def test_cached_blocks_are_skipped(pair: Pair) -> None:
    """Blocks at the ticket's beginning that the destination has are skipped; if it has all, nothing is copied."""
    destination = pair.destination()
    destination.fetch(pair.fetch(ticket_for(range(50, 100)), range(10), num_skipped=40))
    destination.fetch(pair.fetch(ticket_for(range(50)), (), num_skipped=50))
    destination.close()
    expect(pair, range(10), content(NUM_BLOCKS, 0)[90:100])


def test_the_pool_on_the_host_is_read(pair: Pair) -> None:
    """Blocks that the source has swapped out are read from its host pool."""
    destination = pair.destination()
    source_blocks = [NUM_HOST_BLOCKS - 1, 3, 4, 5]
    destination.fetch(pair.fetch(ticket_for(source_blocks, on_host=True), (9, 1, 2, 3)))
    destination.fetch(pair.fetch(ticket_for((3,)), (5,)))
    destination.close()
    arrived = [*content(NUM_HOST_BLOCKS, 1)[source_blocks], content(NUM_BLOCKS, 0)[3]]
    expect(pair, (9, 1, 2, 3, 5), np.stack(arrived))


@pytest.mark.parametrize("on_host", [False, True])
def test_the_destinations_host_pool_is_written(pair: Pair, on_host: bool) -> None:
    """Blocks of either pool of the source go into the destination's host pool if the fetch says so."""
    destination = pair.destination()
    source_blocks = [*range(10, 30), 7, 3]
    blocks = [*range(25, 45), 2, 9]
    destination.fetch(pair.fetch(ticket_for(source_blocks, on_host=on_host), blocks, into_host=True))
    destination.close()
    expected = content(NUM_HOST_BLOCKS, OTHER_SEED + 1)
    expected[blocks] = content(NUM_HOST_BLOCKS, 1)[source_blocks] if on_host else content(NUM_BLOCKS, 0)[source_blocks]
    assert np.array_equal(held(pair.pools, on_host=True), expected)
    expect(pair, (), content(0, 0))


def test_many_fetches_go_one_after_another(pair: Pair) -> None:
    """A link serves many fetches, urgent or not."""
    destination = pair.destination()
    for number in range(20):
        destination.fetch(pair.fetch(ticket_for((number,)), (2 * number,), is_urgent=number % 3 == 0))
    destination.close()
    expect(pair, range(0, 40, 2), content(NUM_BLOCKS, 0)[:20])


def test_a_rate_is_kept_and_urgent_fetches_are_not_held_back(pair: Pair) -> None:
    """After a burst, bytes wait as long as the rate says. Urgent bytes never wait, but count for up to a second."""
    slept: list[float] = []
    block_bytes = content(1, 0).nbytes
    destination = pair.destination(100.0 * block_bytes, slept.append)  # a burst of 2 blocks; the clock does not move
    destination.fetch(pair.fetch(ticket_for(range(52)), range(52), is_urgent=True))
    assert slept == []
    destination.fetch(pair.fetch(ticket_for((0,)), (0,)))
    assert slept == [pytest.approx((52 + 1 - 2) / 100)]
    destination.fetch(pair.fetch(ticket_for(range(1, 300)), range(1, 300), is_urgent=True))
    destination.fetch(pair.fetch(ticket_for((1,)), (1,)))
    destination.close()
    assert slept[1:] == [pytest.approx((100 + 1) / 100)]


def test_a_cancelled_fetch_ends_at_its_next_stride(pair: Pair) -> None:
    """A fetch that is cancelled while a rate holds it back copies no more, and the next fetch succeeds."""
    cancellation, slept = Cancellation(), 0

    def sleep(_: float) -> None:
        nonlocal slept
        slept += 1
        cancellation.cancel("it is no longer wanted")

    destination = pair.destination(1000.0, sleep)
    with pytest.raises(TransferError, match="it is no longer wanted"):
        destination.fetch(pair.fetch(ticket_for(range(NUM_BLOCKS)), range(NUM_BLOCKS)), cancellation)
    with pytest.raises(TransferError, match="it is no longer wanted"):
        destination.fetch(pair.fetch(ticket_for((0,)), (0,)), cancellation)
    assert slept == 1
    expect(pair, (), content(0, 0))
    destination.fetch(pair.fetch(ticket_for((1,)), (1,)))
    destination.close()
    expect(pair, (1,), content(NUM_BLOCKS, 0)[[1]])


def test_another_layout_is_refused(pair: Pair) -> None:
    """If the source's blocks have another layout, nothing is copied."""
    destination = pair.destination()
    with pytest.raises(TransferError, match="the KV of there/worker-0 is laid out differently"):
        destination.fetch(replace(pair.fetch(ticket_for((0,)), (0,)), access=replace(pair.access, layout="other")))
    destination.close()
    expect(pair, (), content(0, 0))


@pytest.mark.parametrize(
    ("source_blocks", "on_host", "blocks", "message"),
    [
        ((NUM_BLOCKS,), False, (0,), "blocks beyond the pool"),
        ((NUM_HOST_BLOCKS,), True, (0,), "blocks beyond the pool"),
        ((0,), False, (NUM_BLOCKS,), "into blocks beyond the pool"),
        ((0,), False, (-1,), "into blocks beyond the pool"),
        ((0, 1), False, (0,), "a fetch of 2 blocks into 1"),
    ],
)
def test_blocks_that_do_not_exist_are_refused(
    pair: Pair, source_blocks: tuple[int, ...], on_host: bool, blocks: tuple[int, ...], message: str
) -> None:
    """A block beyond either pool gives an error of one line, and nothing is copied."""
    destination = pair.destination()
    with pytest.raises(TransferError, match=message):
        destination.fetch(pair.fetch(ticket_for(source_blocks, on_host=on_host), blocks))
    with pytest.raises(TransferError, match="into blocks beyond the pool"):
        destination.fetch(pair.fetch(ticket_for((0,)), (NUM_HOST_BLOCKS,), into_host=True))
    destination.fetch(pair.fetch(ticket_for((1,)), (1,)))  # and the next fetch succeeds
    destination.close()
    expect(pair, (1,), content(NUM_BLOCKS, 0)[[1]])


def test_a_source_killed_in_the_middle_is_noticed(mortal_pair: Pair) -> None:
    """After a kill -9 of the source a fetch completes if the memory is mapped, and otherwise fails with one line."""
    pauses = 0

    def sleep(_: float) -> None:
        nonlocal pauses
        pauses += 1
        if pauses == 2:
            mortal_pair.process.send_signal(signal.SIGKILL)
            mortal_pair.process.wait()

    destination = mortal_pair.destination(1000.0, sleep)
    fetch = mortal_pair.fetch(ticket_for(range(NUM_BLOCKS)), range(NUM_BLOCKS))
    if mortal_pair.kind == "shared":
        destination.fetch(fetch)
        expect(mortal_pair, range(NUM_BLOCKS), content(NUM_BLOCKS, 0))
    else:
        with pytest.raises(TransferError, match=r"^[^\n]+$"):
            destination.fetch(fetch)
    assert pauses >= 2
    destination.close()


def test_a_fetch_from_an_ended_source_fails(mortal_pair: Pair) -> None:
    """A fetch from a source that has ended fails in bounded time."""
    mortal_pair.process.kill()
    mortal_pair.process.wait()
    destination = mortal_pair.destination()
    for is_urgent in (False, True):
        with pytest.raises(TransferError, match=r"^[^\n]+$"):
            destination.fetch(mortal_pair.fetch(ticket_for((0,)), (0,), is_urgent=is_urgent))
    destination.close()
    expect(mortal_pair, (), content(0, 0))


def test_a_fetch_from_a_stopped_source_times_out(mortal_pair: Pair) -> None:
    """A source that hangs delays a fetch no longer than the patience; mapped memory can still be read."""
    mortal_pair.process.send_signal(signal.SIGSTOP)
    destination = mortal_pair.destination()
    fetch = mortal_pair.fetch(ticket_for((5,)), (0,))
    if mortal_pair.kind in SENT:
        with pytest.raises(TransferError, match="sent nothing for 1 s"):
            destination.fetch(fetch)
    elif mortal_pair.kind == "shared":
        destination.fetch(fetch)
        expect(mortal_pair, (0,), content(NUM_BLOCKS, 0)[[5]])
    destination.close()


@pytest.mark.parametrize("lasting_source", SENT, indirect=True)
def test_a_ticket_is_needed_and_valid_once(pair: Pair) -> None:
    """The source refuses a ticket whose blocks were changed, and a ticket that was used before."""
    destination = pair.destination()
    ticket = ticket_for((0, 1))
    for forged in (
        replace(ticket, blocks=(0, 2)),
        replace(ticket, on_host=True),
        replace(ticket, secret="é" + ticket.secret[1:]),
        replace(ticket, stage=1),
    ):
        with pytest.raises(TransferError, match="refused: the ticket is not genuine"):
            destination.fetch(pair.fetch(forged, (0, 1)))
    destination.fetch(pair.fetch(ticket, (8, 9)))
    with pytest.raises(TransferError, match="refused: the ticket was used before"):
        destination.fetch(pair.fetch(ticket, (0, 1)))
    destination.close()
    expect(pair, (8, 9), content(NUM_BLOCKS, 0)[:2])


def test_destinations_do_not_know_the_key() -> None:
    """The tests above fetch with another key than the source's, so a destination does not need that key."""
    assert KEY != b"another key"


def mapped_names() -> str:
    return Path("/proc/self/maps").read_text(encoding="utf-8")


@pytest.mark.parametrize("lasting_source", ["shared"], indirect=True)
def test_a_source_is_mapped_once_and_unmapped(pair: Pair) -> None:
    """A source's pool stays mapped between fetches, until the source is forgotten or restarts."""
    mark = pair.access.shared.rpartition(":")[2]
    destination = pair.destination()
    for number in range(3):
        destination.fetch(pair.fetch(ticket_for((number,)), (number,)))
        assert mapped_names().count(mark) == 1
    destination.forget(Peer(SOURCE.name, 6))
    assert mark in mapped_names()
    destination.forget(SOURCE)
    assert mark not in mapped_names()
    for incarnation in (8, 9):
        destination.fetch(replace(pair.fetch(ticket_for((1,)), (1,)), source=Peer(SOURCE.name, incarnation)))
        assert mapped_names().count(mark) == 1
    destination.close()


@pytest.mark.parametrize("lasting_source", ["shared"], indirect=True)
def test_memory_with_a_wrong_name_or_size_is_not_mapped(pair: Pair) -> None:
    """A wrong name or a wrong size of the memory is an error; reading such memory would crash."""
    pid, number, mark = pair.access.shared.split(":")
    destination = pair.destination()
    wrong = {
        "/etc/passwd": "not the name of shared memory",
        f"{pid}:{number}:{mark}x": "not the name of shared memory",
        f"{pid}:{number}:{mark[::-1]}": "no such KV pool",
        f"{pid}:0:{mark}": "no such KV pool|No such device",
        f"{pid}:999:{mark}": "No such file",
        f"{2**31}:1:{mark}": "No such file",
    }
    for shown, message in wrong.items():
        with pytest.raises(TransferError, match=message):
            destination.fetch(replace(pair.fetch(ticket_for((0,)), (0,)), access=replace(pair.access, shared=shown)))
    with pytest.raises(TransferError, match="not of the announced size"):
        destination.fetch(replace(pair.fetch(ticket_for((0,)), (0,)), access=replace(pair.access, num_blocks=9999)))
    destination.close()
