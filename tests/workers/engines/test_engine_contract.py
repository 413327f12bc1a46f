"""The contract that every engine keeps, fake or real, on CPU and GPU."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from actorserve.core.effects import Fetch
from actorserve.core.kv.tickets import make_ticket
from actorserve.core.messages import Peer, RequestSpec, SamplingParams, StepPlan, TransferId, TransferKind
from workers.engine import Engine
from workers.engine_options import EngineOptions
from workers.engines.fake_engine import FAKE_MODEL, FakeEngine
from workers.engines.torch_engine import TorchEngine
from workers.kv_transfer.transfer import KVTransfer

TOKENS_PER_BLOCK = 8
NUM_HOST_BLOCKS = 5
PROMPT = tuple(range(3, 30))  # 27 tokens: the last of 4 blocks has room
MakeEngine = Callable[[], Engine]

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(
    params=[
        "fake",
        *("cpu-float32", "cpu-bfloat16", "cpu-int8", "cpu-int4"),
        pytest.param("cuda-float32", marks=[pytest.mark.gpu, needs_cuda]),
        pytest.param("cuda-bfloat16", marks=[pytest.mark.gpu, needs_cuda]),
    ]
)
def make_engine(request: pytest.FixtureRequest, make_model: Any) -> MakeEngine:
    """Makes engines with a few blocks on the host."""
    if request.param == "fake":
        model = replace(FAKE_MODEL, vocab_size=211)
        return lambda: FakeEngine(model, 20, TOKENS_PER_BLOCK, num_host_blocks=NUM_HOST_BLOCKS)
    device, _, dtype = request.param.partition("-")
    # Heads as wide as the GPU's attention kernel takes them.
    description = make_model(hidden_size=96, head_dim=16, vocab_size=211).description
    kv_token_bytes = 2 * 2 * 2 * 16 * (4 if dtype == "float32" else 2)  # layers, keys and values, heads, head_dim

    def make() -> Engine:
        return TorchEngine(
            description,
            EngineOptions(
                device=device,
                dtype=dtype,
                tokens_per_block=TOKENS_PER_BLOCK,
                kv_cache_bytes=20 * TOKENS_PER_BLOCK * kv_token_bytes,
                host_kv_bytes=NUM_HOST_BLOCKS * TOKENS_PER_BLOCK * kv_token_bytes,
            ),
        )

    return make


def spec(name: str, seed: int = 1) -> RequestSpec:
    return RequestSpec(name, PROMPT, SamplingParams(seed=seed, max_tokens=20, temperature=1.0))


def prefill(engine: Engine, name: str, tokens: tuple[int, ...], table: tuple[int, ...]) -> int:
    done = engine.begin(StepPlan(0, (name,), (0,), (tokens,), (table,), (True,))).result()
    return done.token_ids[0]


def decode(engine: Engine, name: str, token: int, table: tuple[int, ...], num_tokens: int) -> list[int]:
    """The ``num_tokens`` tokens after ``token``, which follows the prompt."""
    tokens = [token]
    for at in range(len(PROMPT), len(PROMPT) + num_tokens):
        done = engine.begin(StepPlan(at, (name,), (at,), ((tokens[-1],),), (table,), (True,))).result()
        tokens += done.token_ids
    return tokens[1:]


def test_swapped_kv_is_the_same(make_engine: MakeEngine) -> None:
    """A request whose blocks were copied out, overwritten and copied in elsewhere continues with the same tokens."""
    engine = make_engine()
    assert engine.num_host_blocks == NUM_HOST_BLOCKS
    for name in ("alone", "swapped", "other"):
        engine.add(spec(name))
    first = prefill(engine, "alone", PROMPT, (0, 1, 2, 3))
    expected = decode(engine, "alone", first, (0, 1, 2, 3, 4), 10)

    assert prefill(engine, "swapped", PROMPT, (7, 5, 11, 9)) == first
    engine.copy_out((7, 5), (3, 0))
    engine.copy_out((11, 9), (1, 4))
    assert engine.num_written_host_blocks == 4
    prefill(engine, "other", tuple(reversed(PROMPT)), (5, 9, 7, 11))
    engine.copy_in((3, 0, 1, 4), (9, 14, 15, 2))
    assert decode(engine, "swapped", first, (9, 14, 15, 2, 8), 10) == expected


def test_wrong_blocks_change_tokens(make_engine: MakeEngine) -> None:
    """Blocks that come back in the wrong order give other tokens, so the test above can fail."""
    engine = make_engine()
    engine.add(spec("r"))
    first = prefill(engine, "r", PROMPT, (0, 1, 2, 3))
    engine.copy_out((0, 1, 2, 3), (0, 1, 2, 3))
    engine.copy_in((3, 2, 1, 0), (10, 11, 12, 13))
    assert decode(engine, "r", first, (0, 1, 2, 3, 4), 10) != decode(engine, "r", first, (10, 11, 12, 13, 14), 10)


def test_scores_do_not_depend_on_chunks(make_engine: MakeEngine) -> None:
    """The prompt's log-probabilities have one list in any chunks and blocks, with each token's best ones; a row that
    wants none has none.
    """
    engine = make_engine()
    scored = RequestSpec("scored", PROMPT, SamplingParams(seed=1, max_tokens=20, prompt_logprobs=2))
    engine.add(scored)
    engine.add(spec("other"))

    def entries(chunks: tuple[int, ...], table: tuple[int, ...]) -> list[tuple[int, float, int]]:
        found: list[tuple[int, float, int]] = []
        start = 0
        for length in chunks:
            fed, samples = PROMPT[start : start + length], start + length == len(PROMPT)
            other = ((0,), ((9, 8, 7),), ((15,),), (False,))
            plan = StepPlan(
                0,
                ("other", "scored"),
                (*other[0], start),
                (*other[1], fed),
                (*other[2], table),
                (*other[3], samples),
                (False, True),
            )
            none, part = engine.begin(plan).result().prompt_logprobs
            assert none is None
            assert (part is None) == (start == len(PROMPT) - 1)
            if part is not None:
                assert part.num_best == 2
                found += zip(part.token_ids, part.logprobs, part.ranks, strict=True)
            start += length
        return found

    whole = entries((len(PROMPT),), (0, 1, 2, 3))
    assert [token for token, _, _ in whole[::3]] == list(PROMPT[1:])
    assert [rank for _, _, rank in whole[1::3]] == [1] * (len(PROMPT) - 1)
    assert entries((3, 20, 1, 2, 1), (7, 5, 11, 9)) == whole


def test_copies_of_blocks_that_are_not_there_are_refused(make_engine: MakeEngine) -> None:
    """A block beyond either pool is a ValueError, in both directions."""
    engine = make_engine()
    for device, host in (((engine.num_blocks,), (0,)), ((0,), (NUM_HOST_BLOCKS,)), ((0, 1), (0,))):
        with pytest.raises(ValueError, match="copy of"):
            engine.copy_out(device, host)
        with pytest.raises(ValueError, match="copy of"):
            engine.copy_in(host, device)


@pytest.mark.parametrize("is_mapped", [True, False])
def test_kv_of_another_engine_is_the_same(make_engine: MakeEngine, tmp_path: Path, is_mapped: bool) -> None:
    """A request continues with the same tokens on another engine that fetched its blocks, from device and host."""
    here, there = make_engine(), make_engine()
    assert here.kv.layout == there.kv.layout
    for engine in (here, there):
        engine.add(spec("r"))
    first = prefill(there, "r", PROMPT, (0, 1, 2, 3))
    expected = decode(there, "r", first, (0, 1, 2, 3, 4), 10)
    there.copy_out((3,), (2,))
    source = KVTransfer(there.kv, f"ipc://{tmp_path}/there", b"key")
    destination = KVTransfer(here.kv, f"ipc://{tmp_path}/here", b"other")
    # CUDA cannot open a GPU's memory in the process that exported it.
    access = source.access if is_mapped and source.access.shared else replace(source.access, shared="", cuda_ipc="")
    for number, (on_host, source_blocks, blocks) in enumerate(((False, (0, 1, 2), (9, 4, 7)), (True, (2,), (1,)))):
        ticket = make_ticket(b"key", TransferId(TransferKind.MIGRATION, number), 0, source_blocks, on_host=on_host)
        destination.fetch(Fetch(1, Peer("there", 1), access, ticket, 0, blocks, is_urgent=False))
    destination.close()
    source.close()
    assert decode(here, "r", first, (9, 4, 7, 1, 3), 10) == expected


def test_a_fake_engine_fetches_within_a_process() -> None:
    """``fetch_from`` copies the same bytes between two engines of one process as a transfer does."""
    here, there = (FakeEngine(num_blocks=20, tokens_per_block=TOKENS_PER_BLOCK, num_host_blocks=4) for _ in range(2))
    for engine in (here, there):
        engine.add(spec("r"))
    first = prefill(there, "r", PROMPT, (0, 1, 2, 3))
    expected = decode(there, "r", first, (0, 1, 2, 3, 4), 5)
    there.copy_out((3,), (2,))
    here.fetch_from(there, (0, 1, 2), (9, 4, 7))
    here.fetch_from(there, (2,), (1,), on_host=True)
    assert decode(here, "r", first, (9, 4, 7, 1, 3), 5) == expected
    with pytest.raises(ValueError, match="copy of"):
        here.fetch_from(there, (20,), (0,))
