"""tools/bench engine and perplexity: turns, medians, ratios, and how a measurement talks to its peers."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.tools.benchmarks.fake_peer import FakePeer
from tools.benchmarks.common.errors import BenchError
from tools.benchmarks.engine import peers, perplexity
from tools.benchmarks.engine.engine import Result, measure, ratios, shapes
from tools.benchmarks.peers.peer_process import Entry, PeerProcess
from tools.benchmarks.peers.protocol import BlockBudget, Shape, answer, peak_memory_bytes
from tools.figures.figure import Figure

BUDGET = BlockBudget(num_threads=1, context_tokens=4, max_batch=2, max_prompt_tokens=8, max_steps=4)
FAKE = "tests.tools.benchmarks.fake_peer"


def fake(name: str, setting: str = "", **options: Any) -> Entry:
    return Entry(name, setting, FAKE, {"log": "", **options}, Path(sys.executable))


def test_a_peer_answers_commands() -> None:
    """Times, scores and the peak memory come back from the peer's process."""
    with PeerProcess(fake("a", prefill_s=2.0, decode_s=0.5), BUDGET) as peer:
        peer.wait_ready()
        assert peer.measure(Shape("prefill", 8)) == 2.0
        assert peer.measure(Shape("decode", 2)) == 0.5
        assert peer.score([1, 2, 3]) == 3.0
        assert peer.peak_memory_bytes() > 2**20


def test_a_peers_own_output_is_no_answer() -> None:
    """Text that a library prints to stdout is not read as an answer."""
    with PeerProcess(fake("a", chatter="hello"), BUDGET) as peer:
        peer.wait_ready()
        assert peer.measure(Shape("prefill", 8)) == 1.0


def test_a_peer_that_cannot_be_made_says_why() -> None:
    """An expected error becomes one line with the peer's name."""
    with (
        PeerProcess(fake("a", refuses="no such model"), BUDGET) as peer,
        pytest.raises(BenchError, match=r"^a: no such model$"),
    ):
        peer.wait_ready()


def test_a_peer_that_crashes_is_named_with_its_last_line() -> None:
    """A process that ends is an error with its status and the last line of its output."""
    with PeerProcess(fake("a", "fast", crashes=True), BUDGET) as peer:
        peer.wait_ready()
        with pytest.raises(BenchError, match="a, fast: its process ended with status 1: RuntimeError: too much"):
            peer.measure(Shape("prefill", 8))


def test_a_peer_that_cannot_score_says_so() -> None:
    """An engine that cannot score a text answers with an error that names it, and takes further commands."""
    with PeerProcess(fake("a", cannot_score=True), BUDGET) as peer:
        peer.wait_ready()
        with pytest.raises(BenchError, match=r"^a: it cannot say how likely a text is$"):
            peer.score([1, 2, 3])
        assert peer.measure(Shape("prefill", 8)) == 1.0


def test_an_unknown_command_is_refused() -> None:
    """The protocol answers an unknown command with an error."""
    assert "error" in answer(FakePeer({}), {"phase": "sleep"})


def test_peers_take_turns_and_another_peer_begins_each_round(tmp_path: Path) -> None:
    """After warming up, peers alternate within each shape, rotated by one a round."""
    log = tmp_path / "log"
    with PeerProcess(fake("a", log=str(log)), BUDGET) as a, PeerProcess(fake("b", log=str(log)), BUDGET) as b:
        for peer, name in ((a, "a"), (b, "b")):
            peer.wait_ready()
            assert peer.entry.name == name
        measure([a, b], [Shape("prefill", 8), Shape("decode", 2)], rounds=2)
    asked = [json.loads(line) for line in log.read_text().splitlines()]
    processes = [command["process"] for command in asked]
    first, second = processes[0], processes[1]
    assert [command["shape"] for command in asked[4:]] == ["prefill"] * 2 + ["decode"] * 2 + ["prefill"] * 2 + [
        "decode"
    ] * 2
    assert processes[4:] == [first, second, first, second, second, first, second, first]


def test_an_engine_shows_its_better_setting_for_each_shape() -> None:
    """Settings of one engine are one result: the best speed of each shape, and the least memory."""
    on, off = fake("x", "on", prefill_s=1.0, decode_s=4.0), fake("x", "off", prefill_s=2.0, decode_s=1.0)
    with PeerProcess(on, BUDGET) as one, PeerProcess(off, BUDGET) as other:
        for peer in (one, other):
            peer.wait_ready()
        (result,) = measure([one, other], [Shape("prefill", 8), Shape("decode", 2)], rounds=1)
    medians = {name: figure.median for name, figure in result.tokens_per_s.items()}
    assert medians == {"prefill 8": 8.0, "decode 2": 2.0 * Shape("decode", 2).steps}


def test_ratios_are_to_the_same_file_and_to_the_best_format() -> None:
    """A ratio above one means that ours is faster."""
    results = [
        Result("actorserve int8", {"decode 1": Figure(60.0)}, 0),
        Result("llama.cpp same file", {"decode 1": Figure(20.0)}, 0),
        Result("llama.cpp Q4_0", {"decode 1": Figure(30.0)}, 0),
        Result("transformers float32", {"decode 1": Figure(5.0)}, 0),
    ]
    assert ratios(results, "decode 1") == {"actorserve int8": {"same_file": 3.0, "best": 2.0}}
    assert ratios(results[:1], "decode 1") == {}
    assert ratios([results[0], results[2]], "decode 1") == {}  # llama.cpp could not run the same file


def test_decodes_take_more_steps_for_smaller_batches() -> None:
    """A measurement is long enough at batch 1 and not too long at batch 32."""
    assert [shape.steps for shape in shapes((128,), (1, 8, 32))] == [1, 32, 4, 4]
    assert Shape("decode", 8).num_tokens == 32


def test_peak_memory_is_zero_without_proc(tmp_path: Path) -> None:
    """Without /proc the peak is zero, and there is no error."""
    assert peak_memory_bytes(tmp_path / "status") == 0


def test_windows_are_whole_and_without_overlap() -> None:
    """A rest of the text that does not fill a window is not scored."""
    assert perplexity.windows(list(range(10)), 9, 4) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    with pytest.raises(BenchError, match="no window of 4"):
        perplexity.windows([1, 2, 3], 9, 4)


def test_perplexity_scores_float32_first_and_each_format_once() -> None:
    """The base of the comparison is measured first, and llama.cpp without flash attention."""
    found = [
        fake("actorserve int8"),
        fake("actorserve float32"),
        fake("llama.cpp Q4_0", "off", flash_attention=False),
        fake("llama.cpp Q4_0", "on", flash_attention=True),
        fake("transformers float32"),
    ]
    assert [entry.label for entry in perplexity.chosen(found)] == [
        "actorserve float32",
        "actorserve int8",
        "llama.cpp Q4_0, off",
    ]


def test_peers_that_are_not_built_are_left_out_with_a_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without llama.cpp our engine is still measured, and a line names the command that builds llama.cpp."""
    model = tmp_path / "model.gguf"
    model.touch()
    monkeypatch.setenv("ACTORSERVE_CACHE", str(tmp_path))
    assert peers._llama_entries(model, ("Q4_0",), Console()) == []
    assert "tools/bench peers builds it" in capsys.readouterr().out
