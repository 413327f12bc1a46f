"""tools/bench soak: a small run ends well, and errors, wrong answers and growing memory are told."""

import asyncio
import itertools
import json
import mmap
import os
from pathlib import Path

import pytest

from tests.tools.benchmarks.run_bench import run_bench
from tools.benchmarks.soak.chats import Chats, Outcomes
from tools.benchmarks.soak.processes import Watch, own_bytes
from tools.figures.files import read_figures

pytestmark = pytest.mark.serial


def outcomes_with(texts: list[str], status: str = "200 OK") -> Outcomes:
    """What becomes of chats with a server that gives these answers in turn."""
    answers = itertools.cycle(texts)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = next(int(line[15:]) for line in head.splitlines() if line.startswith("content-length"))
        question, text = json.loads(await reader.readexactly(length)), next(answers)
        if question["stream"] and status == "200 OK":
            body = "".join(f"data: {json.dumps({'choices': [{'delta': {'content': part}}]})}\n\n" for part in text)
            body += "data: [DONE]\n\n"
        else:
            body = json.dumps({"choices": [{"message": {"content": text}}], "usage": {"completion_tokens": 1}})
        writer.write(f"HTTP/1.1 {status}\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n{body}".encode())
        await writer.drain()
        writer.close()

    async def ask() -> Outcomes:
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            chats = Chats(url, "m", 3, per_s=300.0, cancelled_share=0.3)
            for _ in range(20):  # until there are enough, on a busy machine too
                await chats.run(0.5)
                if chats.outcomes.finished + chats.outcomes.errors.total() > 150:
                    break
            return chats.outcomes

    return asyncio.run(ask())


def test_right_answers_are_no_errors() -> None:
    """Chats with a right server finish or hang up, and nothing else."""
    outcomes = outcomes_with(["same"])
    assert outcomes.finished > 50
    assert outcomes.cancelled > 5
    assert (outcomes.differing, outcomes.errors.total()) == (0, 0)


def test_other_answers_and_refusals_are_told() -> None:
    """An answer that is not the earlier one to the same question, and a refusal, are counted with an example."""
    assert outcomes_with(["one", "two"]).differing > 0
    refused = outcomes_with(["one"], "503 Service Unavailable")
    assert list(refused.errors) == ["status 503"]
    assert refused.examples[0].startswith("status 503: ")


def test_memory_is_that_of_the_last_minute() -> None:
    """A figure is the median of six samples before its time, so one high sample does not decide."""
    watch = Watch({"me": os.getpid()})
    watch.times_s = [float(10 * number) for number in range(20)]
    watch.used_bytes["me"] = [100] * 9 + [900] + [100] * 9 + [300]
    assert watch.used_at("me", 95.0) == watch.used_at("me", 190.0) == 100


def test_only_own_memory_is_counted() -> None:
    """Memory of the process's own counts, and memory that it may share with others does not."""
    size = 64 * 2**20
    grown = {}
    for flags in (mmap.MAP_SHARED, mmap.MAP_PRIVATE):
        with mmap.mmap(-1, size, flags=flags) as memory:
            before = own_bytes(os.getpid())
            for at in range(0, size, 4096):
                memory[at] = 1
            grown[flags] = own_bytes(os.getpid()) - before
    assert grown[mmap.MAP_SHARED] < size // 10
    assert grown[mmap.MAP_PRIVATE] > size - size // 10


@pytest.mark.model
@pytest.mark.e2e
def test_a_short_soak_publishes_its_counts(tmp_path: Path, default_model_path: Path) -> None:
    """Real processes take chats for some seconds; every process has a row, and nothing is left."""
    file = tmp_path / "figures.json"
    minutes = ("--minutes", "0.1", "--warm-up-minutes", "0.05", "--chats-per-s", "4")
    done = run_bench("soak", *minutes, "--model", str(default_model_path), "--json", str(file))
    assert done.returncode == 0, done.stdout + done.stderr
    counts, memory = read_figures(file).tables
    numbers = [row.cells[0].median for row in counts.rows if row.cells[0] is not None]
    assert numbers[0] > 5
    assert numbers[2:] == [0, 0, 0]
    assert [row.name for row in memory.rows] == [
        *("supervisor", "coordinator", "gateway-0", "gateway-1", "worker-0", "worker-1")
    ]


def test_a_warm_up_as_long_as_all_is_refused() -> None:
    """There would be nothing to compare."""
    done = run_bench("soak", "--minutes", "1", "--warm-up-minutes", "1")
    assert done.returncode == 2
    assert done.stderr == "bench: --warm-up-minutes must be less than --minutes\n"
