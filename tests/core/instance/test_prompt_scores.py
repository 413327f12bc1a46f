"""Scenarios of prompts whose log-probabilities are wanted: where they come from, and when they are sent."""

from dataclasses import replace

import pytest

from actorserve.core.messages import (
    PromptLogprobs,
    RequestSpec,
    Resend,
    SamplingParams,
    StepDone,
    Tokens,
)
from actorserve.core.prompt_scores import PromptScores
from tests.core.harness.driver import CONFIG, Instance
from workers.engines.fake_engine import FakeEngine, expected_scores

PROMPT = tuple(range(20, 33))
VOCAB_SIZE = 1000


class Scored(Instance):
    """An instance whose engine is a FakeEngine, which makes the tokens and the scores of each plan in flight."""

    def __init__(self, **changes: object) -> None:
        super().__init__(replace(CONFIG, **changes))  # type: ignore[arg-type]
        self.engine = FakeEngine(num_blocks=CONFIG.num_blocks, tokens_per_block=CONFIG.tokens_per_block)

    def ask(self, spec: RequestSpec, epoch: int = 1) -> None:
        self.engine.add(spec)
        self.start(spec, epoch)

    def step(self) -> StepDone:
        plan, self.plan = self.plan, None
        assert plan is not None
        done = self.engine.begin(plan).result()
        self.handle(done)
        return done

    @property
    def scores(self) -> tuple[bool, ...]:
        """The column ``scores`` of the plan in flight."""
        assert self.plan is not None
        return self.plan.scores

    def run(self) -> None:
        while self.plan is not None:
            self.step()

    @property
    def tokens(self) -> list[Tokens]:
        return [message for message in self.sent if isinstance(message, Tokens)]


def wants(name: str, num_best: int = 1, prompt: tuple[int, ...] = PROMPT, max_tokens: int = 2) -> RequestSpec:
    return RequestSpec(name, prompt, SamplingParams(seed=0, max_tokens=max_tokens, prompt_logprobs=num_best))


def test_a_scored_prompt_comes_whole_with_token_0() -> None:
    """A prompt of two chunks has one list, in the row of position 0 and in no other."""
    instance = Scored()
    instance.ask(wants("a"))
    instance.run()
    first, second = instance.tokens
    assert first.positions == (0,)
    assert first.prompt_logprobs == (expected_scores(wants("a"), VOCAB_SIZE),)
    assert len(first.prompt_logprobs[0].token_ids) == 2 * (len(PROMPT) - 1)
    assert second.prompt_logprobs == ()


def test_only_rows_that_want_scores_are_scored() -> None:
    """The plan asks for scores during the prefill of that request alone; a plan without any has no such column."""
    instance = Scored()
    instance.ask(wants("a", max_tokens=4))
    assert instance.scores == (True,)
    instance.ask(replace(wants("b"), sampling=SamplingParams(seed=0, max_tokens=4)))
    done = instance.step()
    assert [entry is not None for entry in done.prompt_logprobs] == [True]
    assert list(instance.scores) == [True, False]
    instance.step()
    assert len(instance.scores) == 0


def test_a_scored_prompt_uses_no_cached_prefix_but_leaves_one() -> None:
    """Its blocks are all computed although they are cached; the next request without scores finds them."""
    instance = Scored()
    plain = SamplingParams(seed=0, max_tokens=1)
    instance.ask(RequestSpec("first", PROMPT, plain))
    instance.run()
    instance.ask(wants("a", max_tokens=1))
    assert instance.plan is not None
    assert instance.plan.starts == (0,)
    instance.run()
    assert instance.tokens[-1].prompt_logprobs == (expected_scores(wants("a"), VOCAB_SIZE),)
    assert instance.tokens[-1].num_cached_tokens == ()
    instance.ask(RequestSpec("last", PROMPT, plain))
    assert instance.plan.starts == (12,)


def test_a_resend_from_the_start_repeats_the_scores() -> None:
    """A gateway that lost position 0 gets it again with the prompt's scores; one that has it gets tokens alone."""
    instance = Scored()
    instance.ask(wants("a"))
    instance.run()
    sent = instance.tokens
    instance.sent.clear()
    instance.handle(Resend("a", 1, 0))
    assert instance.tokens == sent
    instance.sent.clear()
    instance.handle(Resend("a", 1, 1))
    assert instance.tokens == sent[1:]


def test_a_request_with_output_is_not_scored_again() -> None:
    """The gateway has the scores if it has a token, so the next owner neither computes nor sends them."""
    instance = Scored()
    instance.ask(replace(wants("a"), output_token_ids=(5,)), epoch=2)
    assert instance.scores == ()
    instance.run()
    assert [message.prompt_logprobs for message in instance.tokens] == [()]


def test_a_prompt_of_one_token_has_an_empty_list() -> None:
    """No logits come before its only token, so the list is there and empty."""
    instance = Scored()
    instance.ask(wants("a", prompt=(5,), max_tokens=1))
    instance.run()
    assert instance.tokens[0].prompt_logprobs == (PromptLogprobs(1, (), (), ()),)


def test_scored_rows_are_sent_alone() -> None:
    """Each scored row has a message of its own, because several lists may exceed a frame; other rows share one."""
    instance = Scored(max_batch_tokens=32)
    plain = SamplingParams(seed=0, max_tokens=1)
    for spec in (
        wants("a", prompt=PROMPT[:3], max_tokens=1),
        RequestSpec("b", PROMPT[:3], plain),
        wants("c", prompt=PROMPT[:4], max_tokens=1),
        RequestSpec("d", PROMPT[:2], plain),
    ):
        instance.ask(spec)
    instance.run()
    assert [message.request_ids for message in instance.tokens][1:] == [("c",), ("b", "d")]


def test_scores_that_skip_tokens_are_a_bug() -> None:
    """A list never has a gap: entries that do not follow those before are a ValueError, and so are uneven columns."""
    scores = PromptScores(0)
    scores.put(1, PromptLogprobs(0, (5, 6), (-1.0, -2.0), (1, 1)))
    scores.put(2, PromptLogprobs(0, (6, 7), (-2.0, -3.0), (1, 2)))
    assert scores.whole() == PromptLogprobs(0, (5, 6, 7), (-1.0, -2.0, -3.0), (1, 1, 2))
    assert scores.num_tokens == 3
    with pytest.raises(ValueError, match="position 5"):
        scores.put(5, PromptLogprobs(0, (9,), (-1.0,), (1,)))
    with pytest.raises(ValueError, match="position 4"):
        scores.put(4, PromptLogprobs(0, (9,), (), (1,)))
