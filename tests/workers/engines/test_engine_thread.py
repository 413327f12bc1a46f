"""The engine's threads: order, results on the loop, and failures."""

import asyncio
import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from llguidance import LLMatcher

from actorserve.core.effects import AddToEngine, CancelFetch, Deliver, DropFromEngine, Fetch, RunStep, SwapIn, SwapOut
from actorserve.core.messages import (
    CopyDone,
    CopyFailed,
    GrammarReady,
    KVAccess,
    KVTicket,
    Peer,
    RequestSpec,
    SamplingParams,
    StepDone,
    StepPlan,
    TransferId,
    TransferKind,
)
from actorserve.model_files.grammars import GrammarCompiler
from workers.engine import EndedStep
from workers.engines.engine_thread import Done, EngineThread
from workers.engines.fake_choice import compiler_of_bytes
from workers.engines.fake_engine import FakeEngine, expected_tokens
from workers.kv_transfer.cancellation import Cancellation
from workers.kv_transfer.errors import TransferError

SPEC = RequestSpec("r", (1, 2, 3), SamplingParams(seed=1, max_tokens=4))
STEP = RunStep(StepPlan(1, ("r",), (0,), ((1, 2, 3),), ((0,),), (True,)))


class GatedEngine(FakeEngine):
    """A fake engine whose steps and copies out wait until the test opens a gate."""

    def __init__(self, make_compiler: Callable[[], GrammarCompiler] | None = None) -> None:
        super().__init__(num_host_blocks=4, make_compiler=make_compiler)
        self.gate = threading.Event()
        self.copy_gate = threading.Event()
        self.thread = threading.current_thread()
        self.is_stepping = threading.Event()

    def begin(self, plan: StepPlan) -> EndedStep:
        self.thread = threading.current_thread()
        self.is_stepping.set()
        assert self.gate.wait(10)
        return super().begin(plan)

    def copy_out(self, device_blocks: Sequence[int], host_blocks: Sequence[int]) -> None:
        assert self.copy_gate.wait(10)
        super().copy_out(device_blocks, host_blocks)


async def test_effects_are_performed_in_order_and_the_result_comes_on_the_loop() -> None:
    """A step still knows a request that is dropped right after it, and its result comes on the loop."""
    engine = FakeEngine()
    thread = EngineThread(engine)
    results: asyncio.Queue[tuple[Done, int]] = asyncio.Queue()
    thread.start(lambda done: results.put_nowait((done, threading.get_ident())))
    for effect in (AddToEngine(SPEC), STEP, DropFromEngine("r"), AddToEngine(SPEC), STEP):
        thread.perform(effect)
    for _ in range(2):
        done, ident = await asyncio.wait_for(results.get(), 10)
        assert isinstance(done, StepDone)
        assert done.token_ids == tuple(expected_tokens(SPEC, 1000, 1))
        assert ident == threading.get_ident()
    thread.stop()


async def test_copies_run_concurrently_with_steps_and_in_order() -> None:
    """A long copy stops no step, but the next copy waits for it; every copy reports its duration on the loop."""
    engine = GatedEngine()
    engine.gate.set()
    thread = EngineThread(engine)
    results: asyncio.Queue[tuple[Done, int]] = asyncio.Queue()
    thread.start(lambda done: results.put_nowait((done, threading.get_ident())))
    for effect in (AddToEngine(SPEC), SwapOut(7, (0,), (3,)), SwapIn(8, (3,), (5,)), STEP):
        thread.perform(effect)
    done, _ = await asyncio.wait_for(results.get(), 10)
    assert isinstance(done, StepDone)
    engine.copy_gate.set()
    for copy_id in (7, 8):
        done, ident = await asyncio.wait_for(results.get(), 10)
        assert isinstance(done, CopyDone)
        assert done.copy_id == copy_id
        assert done.duration_s > 0.0
        assert ident == threading.get_ident()
    decode = StepPlan(2, ("r",), (3,), ((4,),), ((5,),), (True,))  # from the block that came back
    thread.perform(RunStep(decode))
    done, _ = await asyncio.wait_for(results.get(), 10)
    assert isinstance(done, StepDone)
    carried_on = RequestSpec("r", SPEC.prompt_token_ids, SPEC.sampling, output_token_ids=(4,))
    assert done.token_ids == tuple(expected_tokens(carried_on, 1000, 1))
    thread.stop()


class SlowCompiler(GrammarCompiler):
    """Waits until the test opens a gate."""

    def __init__(self) -> None:
        super().__init__(compiler_of_bytes(1000).vocabulary)
        self.gate = threading.Event()

    def compile(self, grammar: str) -> LLMatcher:
        assert self.gate.wait(20)
        return super().compile(grammar)


async def test_a_grammar_is_compiled_beside_the_steps() -> None:
    """While a grammar is being compiled, another request decodes; a grammar gets ready while a step is in flight."""
    compiler = SlowCompiler()
    engine = GatedEngine(make_compiler=lambda: compiler)
    engine.gate.set()
    thread = EngineThread(engine)
    results: asyncio.Queue[Done] = asyncio.Queue()
    thread.start(results.put_nowait)
    grammar = json.dumps({"grammars": [{"lark_grammar": 'start: "a"'}]})
    slow = replace(SPEC, request_id="slow", sampling=replace(SPEC.sampling, grammar=grammar))
    for effect in (AddToEngine(slow), AddToEngine(SPEC), STEP):
        thread.perform(effect)
    done = await asyncio.wait_for(results.get(), 10)
    assert isinstance(done, StepDone)
    for number in range(2, 6):
        thread.perform(RunStep(StepPlan(number, ("r",), (1 + number,), ((4,),), ((0,),), (True,))))
        assert isinstance(await asyncio.wait_for(results.get(), 10), StepDone)
    engine.gate.clear()
    thread.perform(RunStep(StepPlan(6, ("r",), (7,), ((4,),), ((0,),), (True,))))
    compiler.gate.set()
    assert await asyncio.wait_for(results.get(), 10) == GrammarReady("slow")
    engine.gate.set()
    assert isinstance(await asyncio.wait_for(results.get(), 10), StepDone)
    thread.perform(RunStep(StepPlan(7, ("slow",), (0,), ((1, 2, 3),), ((1,),), (True,))))
    done = await asyncio.wait_for(results.get(), 10)
    assert isinstance(done, StepDone)
    assert (done.request_ids, done.token_ids[0] % 256) == (("slow",), ord("a"))
    thread.stop()


@pytest.mark.parametrize(
    ("effect", "error"),
    [
        (STEP, KeyError),  # of a request that the engine does not know
        (SwapOut(1, (0,), (0,)), ValueError),  # to a host that has no block
        (SwapIn(1, (0,), (0,)), ValueError),
    ],
    ids=["step", "copy out", "copy in"],
)
async def test_a_failure_of_the_engine_comes_out(effect: RunStep | SwapOut | SwapIn, error: type[Exception]) -> None:
    """An exception of a step or a copy becomes the result of ``failure``, whose owner then ends the process."""
    thread = EngineThread(FakeEngine())
    thread.start(lambda done: None)
    thread.perform(effect)
    with pytest.raises(error):
        await asyncio.wait_for(thread.failure, 10)


async def test_an_effect_that_is_not_for_an_engine_is_a_bug() -> None:
    """An effect that is not for an engine ends the thread with a TypeError."""
    thread = EngineThread(FakeEngine())
    thread.start(lambda done: None)
    thread.perform(Deliver("r", (1,)))
    with pytest.raises(TypeError):
        await asyncio.wait_for(thread.failure, 10)


def test_a_step_that_outlives_the_loop_ends_in_silence() -> None:
    """A result that comes after the loop is closed is dropped, and the thread ends without a message."""
    engine = GatedEngine()

    async def leave_in_mid_step() -> None:
        thread = EngineThread(engine)
        thread.start(lambda done: None)
        thread.perform(AddToEngine(SPEC))
        thread.perform(STEP)
        thread.stop()
        assert engine.is_stepping.wait(10)

    asyncio.run(leave_in_mid_step())
    engine.gate.set()
    engine.thread.join(10)
    assert not engine.thread.is_alive()


class GatedFetcher:
    """Fetches that are not urgent wait for the gate; fetches of no blocks and cancelled ones fail with ``failure``."""

    def __init__(self, failure: Exception) -> None:
        self.failure = failure
        self.gate = threading.Event()

    def fetch(self, fetch: Fetch, cancellation: Cancellation | None = None) -> None:
        assert fetch.is_urgent or self.gate.wait(10)
        assert cancellation is not None
        if not fetch.blocks or cancellation.is_cancelled:
            raise self.failure


def fetch(copy_id: int, blocks: tuple[int, ...] = (0,), *, is_urgent: bool = False) -> Fetch:
    ticket = KVTicket(TransferId(TransferKind.MIGRATION, 1), 0, on_host=False, blocks=blocks, secret="")
    return Fetch(copy_id, Peer("source", 1), KVAccess("", ""), ticket, 0, blocks, is_urgent)


async def test_fetches_run_concurrently_with_everything_else() -> None:
    """A fetch that is held back delays no step, no copy and no urgent fetch."""
    fetcher = GatedFetcher(TransferError("x"))
    thread = EngineThread(FakeEngine(num_host_blocks=4), fetcher)
    results: asyncio.Queue[Done] = asyncio.Queue()
    thread.start(results.put_nowait)
    for effect in (fetch(1), fetch(2, is_urgent=True), SwapOut(3, (0,), (0,)), AddToEngine(SPEC), STEP):
        thread.perform(effect)
    done = [await asyncio.wait_for(results.get(), 10) for _ in range(3)]
    assert {result.copy_id for result in done if isinstance(result, CopyDone)} == {2, 3}
    assert sum(isinstance(result, StepDone) for result in done) == 1
    fetcher.gate.set()
    last = await asyncio.wait_for(results.get(), 10)
    assert isinstance(last, CopyDone)
    assert last.copy_id == 1
    thread.stop()


@pytest.mark.parametrize("failure", [TransferError("the source is gone"), RuntimeError("a driver's")])
async def test_a_failed_fetch_is_reported_and_ends_nothing(failure: Exception) -> None:
    """Any exception of a fetch becomes a CopyFailed; the next fetch and the steps continue."""
    thread = EngineThread(FakeEngine(), GatedFetcher(failure))
    results: asyncio.Queue[Done] = asyncio.Queue()
    thread.start(results.put_nowait)
    for effect in (fetch(1, (), is_urgent=True), fetch(2, is_urgent=True)):
        thread.perform(effect)
    done = [await asyncio.wait_for(results.get(), 10) for _ in range(2)]
    assert done[0] == CopyFailed(1)
    assert isinstance(done[1], CopyDone)
    assert not thread.failure.done()
    thread.stop()


async def test_a_fetch_is_cancelled_by_its_number(caplog: pytest.LogCaptureFixture) -> None:
    """A fetch that is cancelled fails without a log line, the next one goes on, and a late cancel changes nothing."""
    fetcher = GatedFetcher(TransferError("x"))
    thread = EngineThread(FakeEngine(), fetcher)
    results: asyncio.Queue[Done] = asyncio.Queue()
    thread.start(results.put_nowait)
    for effect in (fetch(1), fetch(2), CancelFetch(1)):
        thread.perform(effect)
    fetcher.gate.set()
    done = [await asyncio.wait_for(results.get(), 10) for _ in range(2)]
    assert done[0] == CopyFailed(1)
    assert isinstance(done[1], CopyDone)
    assert not caplog.records
    thread.perform(CancelFetch(2))
    thread.stop()
    assert not thread.failure.done()


async def test_a_fetch_without_a_fetcher_is_a_bug() -> None:
    """An engine without a fetcher takes no Fetch."""
    thread = EngineThread(FakeEngine())
    thread.start(lambda done: None)
    thread.perform(fetch(1))
    with pytest.raises(TypeError):
        await asyncio.wait_for(thread.failure, 10)
