"""The processes around the gateway that is measured: a coordinator, workers that compute nothing, and a reader."""

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx

from actorserve.actors.membership import COORDINATOR_NAME
from actorserve.model_files.describe import describe
from actorserve.model_files.locate import locate
from actorserve.model_files.tokenizer import Tokenizer, load_tokenizer
from actorserve.processes.child import command_line, write_settings
from actorserve.processes.launch import replace
from actorserve.settings import Settings
from tools.benchmarks.common.children import running, socket_folder
from tools.benchmarks.common.errors import BenchError
from tools.benchmarks.gateway import bare_server, paced_worker, sse_reader
from tools.benchmarks.gateway.sse_reader import Measured
from tools.benchmarks.gateway.step_clock import StepClock, step_tokens

START_STEP_S = 0.2
_START_TIMEOUT_S = 60.0
_POLL_S = 0.05
_ANSWERS_IN_A_ROW = 10
_REQUEST = {"prompt": "Once upon a time", "max_tokens": 1_000_000, "stream": True, "ignore_eos": True}
_STREAM_CONTEXT_TOKENS = 2_000_000
_EVENT = (
    'data: {"id":"cmpl-0123456789abcdef0123456789abcdef","object":"text_completion","created":1700000000,'
    '"model":"SmolLM2-135M-Instruct","choices":[{"index":0,"text":"{}","logprobs":null,"finish_reason":null}]}\n\n'
)


@dataclass(frozen=True, slots=True)
class Model:
    """A model's tokenizer, and the tokens that tell a step."""

    path: Path
    name: str
    tokenizer: Tokenizer
    step_token_ids: Sequence[int]
    step_texts: Sequence[str]


def read_model(name_or_path: str) -> Model:
    """Raises: ModelError, BenchError."""
    path = locate(name_or_path)
    description = describe(path)
    tokenizer = load_tokenizer(description)
    token_ids, texts = step_tokens(tokenizer)
    return Model(path, description.name, tokenizer, token_ids, texts)


class Server:
    """A running server: its port, its own processes, and the pace of the tokens."""

    def __init__(self, port: int, process_ids: Sequence[int], pacer: "subprocess.Popen[str]", clock_file: Path) -> None:
        self.port = port
        self.process_ids = tuple(process_ids)
        self.clock_file = clock_file
        self._pacer = pacer

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def pace(self, step_s: float) -> None:
        """From now on every stream gets a token each ``step_s`` seconds."""
        assert self._pacer.stdin is not None
        self._pacer.stdin.write(f"{step_s}\n")
        self._pacer.stdin.flush()


@contextmanager
def gateway_server(
    model: Model, num_workers: int, *, num_gateways: int = 1, context_tokens: int = _STREAM_CONTEXT_TOKENS
) -> Iterator[Server]:
    """Gateways that share a port, a coordinator and paced workers. Raises: BenchError, if they do not come up."""
    with ExitStack() as stack:
        folder = stack.enter_context(socket_folder())
        port = _free_port()
        settings = replace(Settings(), "model", path=str(model.path), name=model.name)
        settings = replace(settings, "http", port=port)
        write_settings(settings, folder / "settings.json")
        StepClock.create(folder / "clock")
        coordinator = command_line(COORDINATOR_NAME, folder / "settings.json", folder)
        stack.enter_context(running([sys.executable, "-P", "-m", "actorserve", "coordinator", *coordinator]))
        gateways = []
        for index in range(num_gateways):
            child = command_line(f"gateway-{index}", folder / "settings.json", folder, index, num_gateways)
            gateways.append(stack.enter_context(running([sys.executable, "-P", "-m", "actorserve", "gateway", *child])))
        options = paced_worker.Options(
            num_workers,
            str(folder),
            model.name,
            model.tokenizer.vocab_size,
            list(model.step_token_ids),
            str(folder / "clock"),
            START_STEP_S,
            settings.cluster.load_report_s,
            settings.cluster.heartbeat_s,
            settings.cluster.death_after_s,
            context_tokens,
        )
        workers = stack.enter_context(running(_module(paced_worker.__name__, asdict(options))))
        server = Server(port, [gateway.pid for gateway in gateways], workers, folder / "clock")
        _wait_for(f"{server.url}/metrics", gateways, num_workers)
        yield server


@contextmanager
def bare_hypercorn(model: Model, num_workers: int) -> Iterator[Server]:
    """hypercorn and starlette alone, with the same steps and events. Raises: BenchError, if it does not come up."""
    with ExitStack() as stack:
        folder = stack.enter_context(socket_folder())
        StepClock.create(folder / "clock")
        options = bare_server.Options(
            num_workers, _free_port(), _EVENT, list(model.step_texts), str(folder / "clock"), START_STEP_S
        )
        process = stack.enter_context(running(_module(bare_server.__name__, asdict(options))))
        server = Server(options.port, [process.pid], process, folder / "clock")
        _wait_for_port(options.port, process)
        yield server


class ReaderProcess:
    """The process that reads many streams of one server."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    def open(self, num: int) -> None:
        """Open streams. Raises: BenchError, unless all of them get an event."""
        opened = self._ask({"open": num})
        if opened["opened"] < num or opened["ended"]:
            raise BenchError(f"of {num} streams {opened['opened']} got an event, and {opened['ended']} ended")

    def measure(self, seconds: float) -> Measured:
        return Measured(**self._ask({"measure": seconds}))

    def close(self) -> None:
        """Close all streams."""
        self._ask({"close": True})

    def _ask(self, command: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise BenchError("the reader of the streams has ended early")
        answer: dict[str, Any] = json.loads(line)
        return answer


@contextmanager
def reader_of(server: Server, model: Model) -> Iterator[ReaderProcess]:
    body = json.dumps(_REQUEST | {"model": model.name})
    options = sse_reader.Options(server.port, body, list(model.step_texts), str(server.clock_file), server.process_ids)
    with running(_module(sse_reader.__name__, asdict(options))) as process:
        yield ReaderProcess(process)


def _module(name: str, options: dict[str, Any]) -> list[str]:
    return [sys.executable, "-P", "-m", name, json.dumps(options)]


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def _wait_for(url: str, gateways: "Sequence[subprocess.Popen[str]]", num_workers: int) -> None:
    """Wait until all gateways listen and know all workers. The kernel chooses a gateway for each connection."""
    until_s = time.monotonic() + _START_TIMEOUT_S
    num_ready = 0  # answers in a row
    while time.monotonic() < until_s and all(gateway.poll() is None for gateway in gateways):
        try:
            page = httpx.get(url, trust_env=False).text
            num_ready = num_ready + 1 if f"\nactorserve_instances {num_workers}.0\n" in page else 0
            if num_ready == _ANSWERS_IN_A_ROW * len(gateways):
                return
        except httpx.HTTPError:
            num_ready = 0  # no gateway listens yet
        if not num_ready:
            time.sleep(_POLL_S)
    raise BenchError("the gateways did not come up")


def _wait_for_port(port: int, process: "subprocess.Popen[str]") -> None:
    until_s = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < until_s and process.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            return
        except ConnectionError:
            time.sleep(_POLL_S)
    raise BenchError("the bare server did not come up")
