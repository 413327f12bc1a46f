"""Scenarios of the prefix cache: requests with a common prefix compute its KV once."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from actorserve.core.kv.prefix_cache import block_names
from actorserve.core.messages import (
    Finished,
    FinishReason,
    LoadReport,
    Peer,
    PeerUp,
    Release,
    RequestSpec,
    Resend,
    Role,
    SamplingParams,
    Tick,
    Tokens,
)
from actorserve.core.request import Request
from tests.core.harness.driver import CONFIG, GATEWAY, Instance

TEXT = tuple(range(20, 40))


def spec(name: str, prompt: Sequence[int], max_tokens: int = 4, **fields: object) -> RequestSpec:
    made = RequestSpec(name, tuple(prompt), SamplingParams(seed=0, max_tokens=max_tokens))
    return replace(made, **fields)  # type: ignore[arg-type]


def run(instance: Instance, *requests: RequestSpec) -> None:
    """Start the requests and run until nothing is left to do."""
    for request in requests:
        instance.start(request)
    while instance.plan is not None:
        instance.done()


def chunks(instance: Instance) -> dict[str, tuple[int, int]]:
    """Of the plan in flight: each request's first position and number of tokens."""
    plan = instance.plan
    assert plan is not None
    return {
        name: (start, len(token_ids))
        for name, start, token_ids in zip(plan.request_ids, plan.starts, plan.token_ids, strict=True)
    }


def cached_tokens(instance: Instance) -> dict[str, int]:
    """The number of cached tokens sent for each request."""
    return {
        name: number
        for message in instance.sent
        if isinstance(message, Tokens)
        for name, number in zip(message.request_ids, message.num_cached_tokens, strict=False)
    }


def test_a_prompt_seen_before_is_not_computed_again() -> None:
    """Its full blocks are reused, and reported with the first token; only later tokens are computed."""
    instance = Instance()
    run(instance, spec("a", TEXT[:10], max_tokens=1))
    instance.start(spec("b", TEXT[:10], max_tokens=1))
    assert chunks(instance) == {"b": (8, 2)}
    assert instance.plan is not None
    assert instance.plan.block_tables[0][:2] == (0, 1)
    instance.done()
    assert instance.sent[-2] == Tokens(("b",), (1,), (0,), (9,), (), (8,))


def test_the_last_token_is_always_computed() -> None:
    """If all blocks of a prompt are cached, the last one is fed again, because feeding gives the next token."""
    instance = Instance()
    run(instance, spec("a", TEXT[:8], max_tokens=2))
    instance.start(spec("b", TEXT[:8]))
    assert chunks(instance) == {"b": (4, 4)}
    instance.done()
    # The block that b filled has the same content as a's, so b now shares that one, and its own is free.
    assert instance.state.requests["b"].blocks[:2] == [0, 1]
    assert instance.state.memory.device.num_free_blocks == CONFIG.num_blocks - 3


def test_a_prompt_that_begins_alike_shares_the_beginning() -> None:
    """Blocks are shared up to the first difference, even while their first owner still runs."""
    instance = Instance()
    instance.start(spec("a", TEXT[:8], max_tokens=8))
    instance.done()
    instance.start(spec("b", (*TEXT[:6], 1, 2, 3)))
    instance.done()
    assert chunks(instance) == {"a": (9, 1), "b": (4, 5)}
    a, b = instance.state.requests.values()
    assert a.blocks[0] == b.blocks[0]
    assert not set(a.blocks[1:]) & set(b.blocks[1:])
    assert instance.state.memory.device.num_free_blocks == CONFIG.num_blocks - 5
    instance.handle(Release("a", 1))
    instance.done()
    assert instance.state.memory.device.num_free_blocks == CONFIG.num_blocks - 3


def test_blocks_of_an_iteration_in_flight_are_not_shared_yet() -> None:
    """A request that arrives during another's prefill finds the finished chunks, and no more."""
    instance = Instance(replace(CONFIG, max_batch_tokens=12, max_context_tokens=64, num_blocks=16))
    instance.start(spec("a", TEXT[:18], max_tokens=8))
    instance.start(spec("b", TEXT[:18], max_tokens=8))
    assert chunks(instance) == {"a": (0, 12)}
    instance.done()
    assert chunks(instance) == {"a": (12, 6), "b": (12, 6)}
    instance.done()
    # Both computed the fourth block, and only one of the two equal blocks is kept.
    a, b = instance.state.requests.values()
    assert a.blocks[:4] == b.blocks[:4]
    assert a.blocks[4] != b.blocks[4]


def test_an_aborted_iteration_shares_nothing() -> None:
    """If a request leaves during an iteration, that iteration's blocks are not cached."""
    instance = Instance()
    instance.start(spec("a", TEXT[:8]))
    instance.handle(Release("a", 1))
    instance.done()
    instance.start(spec("b", TEXT[:8]))
    assert chunks(instance) == {"b": (0, 8)}


def test_output_is_found_too() -> None:
    """A conversation's next turn finds the previous prompt and answer."""
    instance = Instance()
    run(instance, spec("a", TEXT[:6], max_tokens=4))
    instance.start(spec("b", (*TEXT[:6], 9, 9, 9, 9, 1, 2)))
    assert chunks(instance) == {"b": (8, 4)}


def test_a_failed_over_request_finds_its_tokens() -> None:
    """Output that came with the request is cached like its prompt, and the cached prompt is not reported again."""
    instance = Instance()
    run(instance, spec("a", TEXT[:6], max_tokens=4))
    instance.start(spec("b", TEXT[:6], max_tokens=6, output_token_ids=(9, 9, 9)), epoch=2)
    assert chunks(instance) == {"b": (8, 1)}
    instance.done()
    assert cached_tokens(instance) == {}


def test_a_preempted_request_finds_its_own_blocks() -> None:
    """Blocks of a preempted request stay cached until they are needed, and do not count as a cached prompt."""
    instance = Instance(replace(CONFIG, num_blocks=7, max_context_tokens=28))
    instance.start(spec("a", TEXT[:8], max_tokens=12))
    instance.start(spec("b", (1, *TEXT[:8]), max_tokens=12))
    while instance.state.batcher.num_preemptions == 0:
        instance.done()
    b = instance.state.requests["b"]
    assert (b.blocks, b.num_computed) == ([], 0)
    while not b.is_started:
        instance.done()
    assert b.num_computed >= 8
    run(instance)
    assert instance.sent[-1] == Finished("b", 1, FinishReason.LENGTH, 12)
    assert cached_tokens(instance) == {}


def test_salts_are_kept_apart() -> None:
    """Requests share blocks only with requests of the same salt."""
    instance = Instance(replace(CONFIG, num_blocks=32))
    for index, (salt, first) in enumerate((("", 0), ("x", 0), ("x", 8), ("y", 0), ("", 8))):
        instance.start(spec(f"r{index}", TEXT[:10], max_tokens=1, cache_salt=salt))
        assert chunks(instance)[f"r{index}"][0] == first
        while instance.plan is not None:
            instance.done()


def test_eviction_takes_the_oldest_and_spares_found_blocks() -> None:
    """Under pressure a new request keeps the cached blocks that it found, and evicts others."""
    instance = Instance(replace(CONFIG, num_blocks=6, max_context_tokens=24))
    run(instance, spec("a", TEXT[:9], max_tokens=1))
    run(instance, spec("b", (1, *TEXT[:8]), max_tokens=1))
    instance.start(spec("c", TEXT[:20], max_tokens=1))  # needs five blocks: has a's two, two empty ones, and one of b's
    assert chunks(instance) == {"c": (8, 8)}
    run(instance)
    instance.start(spec("d", (1, *TEXT[:8])))
    assert chunks(instance)["d"] == (4, 5)


def test_admission_counts_what_is_free_and_cached_as_taken() -> None:
    """Found blocks with an owner cost a new request no free block; cached blocks without one do."""
    instance = Instance(replace(CONFIG, num_blocks=7, max_batch_tokens=32))
    run(instance, spec("a", TEXT[:9], max_tokens=1))
    instance.start(spec("b", (1,) * 10, max_tokens=3))  # three of the seven
    instance.start(spec("c", TEXT[:16], max_tokens=3))  # four, two of them cached: nothing would be left for b to grow
    instance.done()
    assert not instance.state.requests["c"].is_started
    instance.handle(Release("b", 1))
    instance.start(spec("d", TEXT[:15], max_tokens=3))
    instance.done()
    assert instance.state.requests["c"].is_started
    instance.done()
    assert instance.state.requests["d"].is_started  # c owns three of its four


def test_without_the_setting_nothing_is_shared() -> None:
    """With prefix_cache off every request computes all of its tokens, and blocks are empty once free."""
    instance = Instance(replace(CONFIG, prefix_cache=False))
    run(instance, spec("a", TEXT[:10]))
    instance.start(spec("b", TEXT[:10]))
    assert chunks(instance) == {"b": (0, 8)}
    instance.done()
    assert (instance.state.memory.prefixes.num_tokens_looked_up, instance.state.memory.prefixes.num_tokens_found) == (
        0,
        0,
    )


def test_lost_first_tokens_tell_it_again() -> None:
    """A resent first token carries the number of cached tokens like the lost one."""
    instance = Instance()
    run(instance, spec("a", TEXT[:10], max_tokens=1))
    run(instance, spec("b", TEXT[:10], max_tokens=2))
    instance.sent.clear()
    instance.handle(Resend("b", 1, 0))
    assert instance.sent[0] == Tokens(("b",), (1,), (0,), (9, 9), (), (8,), run_lengths=(2,))


def test_reports_count_shared_blocks_once_and_what_was_found() -> None:
    """Used memory counts each owned block once; the head of the line demands the free blocks that it would take."""
    coordinator = Peer("coordinator", 1)
    instance = Instance(replace(CONFIG, max_batch_requests=2, max_batch_tokens=32))
    instance.handle(PeerUp(coordinator, Role.COORDINATOR))
    instance.start(spec("a", TEXT[:10], max_tokens=9))
    instance.done()
    instance.start(spec("b", TEXT[:10], max_tokens=9))
    instance.start(spec("c", TEXT[:14], max_tokens=9))
    instance.done()
    instance.handle(Tick(), now=0.5)
    report = instance.sent[-1]
    assert isinstance(report, LoadReport)
    assert (report.num_running, report.num_waiting) == (2, 1)
    assert report.kv_used_bytes == (2 + 1 + 1) * 100
    assert report.virtual_usage_bytes == (4 + 2) * 100
    assert (report.num_tokens_looked_up, report.num_tokens_found) == (20, 8)


@pytest.mark.parametrize("tokens_per_block", [1, 4])
def test_names_stand_for_all_tokens_before(tokens_per_block: int) -> None:
    """Names are equal exactly if the salt and all tokens so far are equal, and do not depend on when they are made."""

    def names(prompt: Sequence[int], salt: str = "") -> list[bytes]:
        request = Request(spec("r", prompt, cache_salt=salt), 1, GATEWAY)
        return block_names(request, len(prompt) // tokens_per_block, tokens_per_block)

    usual, salted, other = names(TEXT), names(TEXT, "x"), names((*TEXT[:7], 1, *TEXT[8:]))
    assert len({*usual, *salted}) == 2 * (len(TEXT) // tokens_per_block)
    first_other = 7 // tokens_per_block
    assert other[:first_other] == usual[:first_other]
    assert not set(other[first_other:]) & set(usual)
    growing = Request(spec("r", TEXT[:5]), 1, GATEWAY)
    block_names(growing, 5 // tokens_per_block, tokens_per_block)
    growing.token_ids.extend(TEXT[5:])
    assert block_names(growing, len(usual), tokens_per_block) == usual
    assert block_names(growing, 2, tokens_per_block) == usual[:2]
