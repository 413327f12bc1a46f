"""Scenarios of the prefix cache: what one request computed, others that begin alike do not compute again."""

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
    """What was told of each request's cached tokens."""
    return {
        name: number
        for message in instance.sent
        if isinstance(message, Tokens)
        for name, number in zip(message.request_ids, message.num_cached_tokens, strict=False)
    }


def test_a_prompt_seen_before_is_not_computed_again() -> None:
    """Its full blocks are taken as they are, and told with the first token; what follows them is computed."""
    instance = Instance()
    run(instance, spec("a", TEXT[:10], max_tokens=1))
    instance.start(spec("b", TEXT[:10], max_tokens=1))
    assert chunks(instance) == {"b": (8, 2)}
    assert instance.plan is not None
    assert instance.plan.block_tables[0][:2] == (0, 1)
    instance.done()
    assert instance.sent[-2] == Tokens(("b",), (1,), (0,), (9,), (), (8,))


def test_the_last_token_is_always_computed() -> None:
    """A prompt of whole blocks that are all cached is fed its last block, for feeding gives the next token."""
    instance = Instance()
    run(instance, spec("a", TEXT[:8], max_tokens=2))
    instance.start(spec("b", TEXT[:8]))
    assert chunks(instance) == {"b": (4, 4)}
    instance.done()
    # The block that b filled holds what a's holds: b went over to that one, and its own is free.
    assert instance.state.requests["b"].blocks[:2] == [0, 1]
    assert instance.state.memory.device.num_free_blocks == CONFIG.num_blocks - 3


def test_a_prompt_that_begins_alike_shares_the_beginning() -> None:
    """Blocks are shared up to the first one that differs, also while their first owner still runs."""
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


def test_what_an_iteration_in_flight_computes_is_not_shared_yet() -> None:
    """A request that comes while another's prompt is in prefill finds the chunks that are done, and no more."""
    instance = Instance(replace(CONFIG, max_batch_tokens=12, max_context_tokens=64, num_blocks=16))
    instance.start(spec("a", TEXT[:18], max_tokens=8))
    instance.start(spec("b", TEXT[:18], max_tokens=8))
    assert chunks(instance) == {"a": (0, 12)}
    instance.done()
    assert chunks(instance) == {"a": (12, 6), "b": (12, 6)}
    instance.done()
    # Both computed the fourth block; of two equal ones one is kept.
    a, b = instance.state.requests.values()
    assert a.blocks[:4] == b.blocks[:4]
    assert a.blocks[4] != b.blocks[4]


def test_an_aborted_iteration_shares_nothing() -> None:
    """A request that leaves under a running iteration leaves nothing of it behind."""
    instance = Instance()
    instance.start(spec("a", TEXT[:8]))
    instance.handle(Release("a", 1))
    instance.done()
    instance.start(spec("b", TEXT[:8]))
    assert chunks(instance) == {"b": (0, 8)}


def test_output_is_found_too() -> None:
    """A conversation's next turn finds the prompt and the answer of the one before."""
    instance = Instance()
    run(instance, spec("a", TEXT[:6], max_tokens=4))
    instance.start(spec("b", (*TEXT[:6], 9, 9, 9, 9, 1, 2)))
    assert chunks(instance) == {"b": (8, 4)}


def test_a_failed_over_request_finds_its_tokens() -> None:
    """Output that came with the request counts like its prompt, and says nothing of the prompt's cached tokens."""
    instance = Instance()
    run(instance, spec("a", TEXT[:6], max_tokens=4))
    instance.start(spec("b", TEXT[:6], max_tokens=6, output_token_ids=(9, 9, 9)), epoch=2)
    assert chunks(instance) == {"b": (8, 1)}
    instance.done()
    assert cached_tokens(instance) == {}


def test_a_preempted_request_finds_its_own_blocks() -> None:
    """Preemption keeps what was computed as long as nobody needs the place, and is not told as a cached prompt."""
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
    """Requests share with those of the same salt alone."""
    instance = Instance(replace(CONFIG, num_blocks=32))
    for index, (salt, first) in enumerate((("", 0), ("x", 0), ("x", 8), ("y", 0), ("", 8))):
        instance.start(spec(f"r{index}", TEXT[:10], max_tokens=1, cache_salt=salt))
        assert chunks(instance)[f"r{index}"][0] == first
        while instance.plan is not None:
            instance.done()


def test_eviction_takes_the_oldest_and_spares_what_is_to_be_used() -> None:
    """Under pressure a newcomer keeps its own cached blocks while it takes others' places."""
    instance = Instance(replace(CONFIG, num_blocks=6, max_context_tokens=24))
    run(instance, spec("a", TEXT[:9], max_tokens=1))
    run(instance, spec("b", (1, *TEXT[:8]), max_tokens=1))
    instance.start(spec("c", TEXT[:20], max_tokens=1))  # needs five blocks: has a's two, two empty ones, and one of b's
    assert chunks(instance) == {"c": (8, 8)}
    run(instance)
    instance.start(spec("d", (1, *TEXT[:8])))
    assert chunks(instance)["d"] == (4, 5)


def test_admission_counts_what_is_free_and_cached_as_taken() -> None:
    """Blocks that somebody owns cost a newcomer nothing; cached ones that nobody owns cost it their place."""
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
    """A resent first token tells the cached tokens as the lost one did."""
    instance = Instance()
    run(instance, spec("a", TEXT[:10], max_tokens=1))
    run(instance, spec("b", TEXT[:10], max_tokens=2))
    instance.sent.clear()
    instance.handle(Resend("b", 1, 0))
    assert instance.sent[0] == Tokens(("b", "b"), (1, 1), (0, 1), (9, 9), (), (8, 0))


def test_reports_count_shared_blocks_once_and_what_was_found() -> None:
    """Use is what is owned, each block once; the head of the line demands what would have to be taken for it."""
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
    """Blocks' names are equal exactly where salt and all tokens so far are, and do not depend on when they are made."""

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
    growing.token_ids += TEXT[5:]
    assert block_names(growing, len(usual), tokens_per_block) == usual
    assert block_names(growing, 2, tokens_per_block) == usual[:2]
