"""tools/bench serve against a small server in the test: its requests, its figures, and how it reports failures."""

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tools.benchmarks.__main__ import main
from tools.benchmarks.serving.client import events, measure
from tools.benchmarks.serving.drive import Drive, Job
from tools.figures.files import read_figures

ROOT = Path(__file__).resolve().parents[3]
DEADLINE_S = 30.0


class Server:
    """Answers as OpenAI's API does: ``max_tokens`` chunks, then usage. ``misbehaviour`` says what goes wrong."""

    def __init__(self, misbehaviour: str = "") -> None:
        self.misbehaviour = misbehaviour
        self.bodies: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.running = 0
        self.most_running = 0
        self.url = ""
        self.asked = asyncio.Event()

    @asynccontextmanager
    async def listening(self) -> AsyncIterator["Server"]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        async with server:
            self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            yield self

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            path = head.split()[1]
            length = next((int(line[15:]) for line in head.lower().splitlines() if "content-length" in line), 0)
            body = await reader.readexactly(length)
            if path == "/v1/models":
                self._answer(writer, "200 OK", json.dumps({"data": [{"id": "tiny"}]}).encode())
            else:
                await self._generate(path, json.loads(body), writer)
            await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the client left
        finally:
            writer.close()

    def _answer(self, writer: asyncio.StreamWriter, status: str, body: bytes) -> None:
        head = f"HTTP/1.1 {status}\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)

    async def _generate(self, path: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        self.paths.append(path)
        self.bodies.append(body)
        self.asked.set()
        if self.misbehaviour == "refuses":
            self._answer(writer, "503 Service Unavailable", b"{}")
            return
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-type: text/event-stream\r\n\r\n")
            for data in self._events(path, body):
                writer.write(f"data: {data}\n\n".encode())
                await writer.drain()
            if self.misbehaviour == "hangs":
                await asyncio.Event().wait()
        finally:
            self.running -= 1

    def _events(self, path: str, body: dict[str, Any]) -> Iterator[str]:
        chat = "chat" in path
        if chat:
            yield json.dumps({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        for _ in range(body["max_tokens"]):
            yield json.dumps({"choices": [{"delta": {"content": "a"}} if chat else {"text": "a"}]})
        if self.misbehaviour == "errs":
            yield json.dumps({"error": {"message": "the engine is gone"}})
        if self.misbehaviour == "garbles":
            yield "{"
        if self.misbehaviour:
            return
        yield json.dumps({"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": body["max_tokens"]}})
        yield "[DONE]"


async def bench(*arguments: str) -> int:
    """Run the command while the test's server runs; return its exit status."""
    async with asyncio.timeout(DEADLINE_S):
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tools.benchmarks", "serve", *arguments),
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
        )
        return await process.wait()


async def test_a_closed_loop_keeps_its_concurrency(tmp_path: Path) -> None:
    """Every request is sent once with its forced length, at most N run at once, and the report adds up."""
    report = tmp_path / "report.json"
    async with Server().listening() as server:
        code = await bench(
            *("--url", server.url, "--requests", "12", "--concurrency", "3", "--output-tokens", "4"),
            *("--warmup", "0", "--json", str(report)),
        )
    assert code == 0
    assert len(server.bodies) == 12
    assert server.most_running <= 3
    assert set(server.paths) == {"/v1/chat/completions"}
    for body in server.bodies:
        assert (body["max_tokens"], body["min_tokens"], body["ignore_eos"], body["stream"]) == (4, 4, True, True)
        assert (body["temperature"], body["top_p"], body["top_k"], body["min_p"]) == (1.0, 1.0, 0, 0.0)
    written = read_figures(report).details
    result = written["result"]
    assert (result["num_completed"], result["output_tokens"], result["prompt_tokens"]) == (12, 48, 60)
    assert set(result["latencies_s"]["ttft"]) == {"count", "mean", "p50", "p90", "p99"}
    assert result["latencies_s"]["itl"]["count"] == 36
    assert read_figures(report).machine.cpu
    assert (written["workload"]["model"], written["workload"]["interrupted"]) == ("tiny", False)


async def test_prompts_can_be_token_ids() -> None:
    """With the completions API prompts are lists of ids of the asked length, the same for the same seed."""
    runs = []
    for _ in range(2):
        async with Server().listening() as server:
            arguments = ("--api", "completions", "--prompt-tokens", "uniform:3:9", "--rate", "1000", "--warmup", "0")
            assert await bench("--url", server.url, "--requests", "5", *arguments) == 0
        assert set(server.paths) == {"/v1/completions"}
        runs.append(sorted(body["prompt"] for body in server.bodies))
    assert runs[0] == runs[1]
    assert all(3 <= len(prompt) <= 9 and all(1000 <= token < 30000 for token in prompt) for prompt in runs[0])


@pytest.mark.parametrize(
    ("misbehaviour", "kind"),
    [
        ("refuses", "status 503"),
        ("errs", "error in stream: the engine is gone"),
        ("cuts", "stream cut"),
        ("garbles", "malformed event"),
    ],
)
async def test_failures_are_reported_by_kind(misbehaviour: str, kind: str) -> None:
    """A request that fails is an outcome with its kind, and raises nothing."""
    async with Server(misbehaviour).listening() as server, httpx.AsyncClient(base_url=server.url) as client:
        outcome = await measure(client, "/v1/completions", {"max_tokens": 2})
    assert outcome.error == kind
    assert outcome.ended_s is None


async def test_a_server_that_is_gone_is_an_outcome() -> None:
    """A refused connection is an outcome with its kind."""
    async with Server().listening() as server:
        url = server.url
    async with httpx.AsyncClient(base_url=url) as client:
        assert (await measure(client, "/v1/completions", {"max_tokens": 2})).error == "no connection"


async def test_an_open_loop_does_not_wait() -> None:
    """Requests are sent at their times, although no earlier request has ended."""
    server = Server("hangs")
    async with server.listening(), httpx.AsyncClient(base_url=server.url, timeout=DEADLINE_S) as client:
        drive = Drive(client, "/v1/completions")
        async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as group:
            running = group.create_task(drive.open_loop([Job(0.0, {"max_tokens": 1})] * 5))
            while server.running < 5:
                server.asked.clear()
                await server.asked.wait()
            running.cancel()
    assert [outcome.error for outcome in drive.outcomes] == [None] * 5


async def test_ctrl_c_prints_the_outcomes_so_far(tmp_path: Path) -> None:
    """An interrupted measurement still reports its outcomes, says so, and exits like an interrupted command."""
    report = tmp_path / "report.json"
    async with asyncio.timeout(DEADLINE_S), Server("hangs").listening() as server:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tools.benchmarks", "serve", "--url", server.url, "--rate", "1000"),
            *("--requests", "3", "--warmup", "0", "--json", str(report)),
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
        )
        await server.asked.wait()
        process.send_signal(signal.SIGINT)
        assert await process.wait() == 130
    written = read_figures(report).details
    assert written["workload"]["interrupted"] is True
    assert written["result"]["num_unfinished"] >= 1


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--url", "http://127.0.0.1:9"], "no server answers at http://127.0.0.1:9"),
        (["--trace", "/nowhere.csv"], "cannot read trace /nowhere.csv: No such file"),
        (["--prompt-tokens", "zipf:3"], "no such length distribution: 'zipf:3'"),
        (["--url", "ftp:/x"], "ftp:/x"),
    ],
)
def test_a_failed_measurement_is_one_line(arguments: list[str], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A server that is down, a bad file or a bad distribution ends with one line and exit status 2."""
    assert main(["serve", *arguments]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert why in said


async def test_events_are_read_as_the_standard_says() -> None:
    """Data lines of one event are joined, without comments and other fields."""

    async def lines() -> AsyncIterator[str]:
        for line in (": keep-alive", "", "event: x", "data: a", "data:b", "", "data: [DONE]", ""):
            yield line

    assert [data async for data in events(lines())] == ["a\nb", "[DONE]"]
