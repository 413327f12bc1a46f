"""Grammars in a worker: masks depend on a request's tokens alone, and an answer can always end."""

import json
import random
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from llguidance import LLMatcher

from actorserve.core.messages import RequestSpec, SamplingParams
from actorserve.model_files.grammars import GrammarCompiler, Vocabulary
from workers.sampling import grammar_state
from workers.sampling.grammar_state import Words
from workers.sampling.grammars import Grammars, Masks
from workers.sampling.sampler import Sampler

WORDS = [b"ab", b"abc", b"name", b'"name"', b'":', b"  ", b"true", b"12", b'{"', b"}}", b'"}', b'","']
TOKENS = [*(bytes([byte]) for byte in range(256)), *WORDS, b"<end>", b"<eot>", b"", b"", b""]
END, EOT = 256 + len(WORDS), 257 + len(WORDS)
VOCAB_SIZE = len(TOKENS)  # no multiple of 8 or 32
EOS_IDS = (END, EOT)
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 9}, "b": {"type": "boolean"}, "n": {"type": "integer"}},
    "required": ["name", "b"],
}
GRAMMARS = {
    "schema": json.dumps({"grammars": [{"json_schema": SCHEMA}]}),
    "regex": json.dumps({"grammars": [{"lark_grammar": "start: /(ab|abc)*c/"}]}),
    "tree": json.dumps({"grammars": [{"lark_grammar": 'start: "(" start* ")"'}]}),
}


def compiler() -> GrammarCompiler:
    return GrammarCompiler(Vocabulary(TOKENS, EOS_IDS, EOS_IDS))


def make() -> Grammars:
    return Grammars(compiler, VOCAB_SIZE, (*EOS_IDS, 10**6), num_threads=2)


def add(grammars: Grammars, request: RequestSpec) -> None:
    grammars.add(request, grammars.prepare(request))


def lark(text: str) -> str:
    return json.dumps({"grammars": [{"lark_grammar": text}]})


def spec(name: str, grammar: str, output: Sequence[int] = (), **sampling: object) -> RequestSpec:
    usual = SamplingParams(seed=1, max_tokens=99, stop_token_ids=EOS_IDS, grammar=grammar)
    return RequestSpec(name, (1, 2), replace(usual, **sampling), tuple(output))  # type: ignore[arg-type]


def allowed(masks: Masks, index: int = 0) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(masks.allowed[index], bitorder="little")).tolist())


def mask(grammar: str, output: Sequence[int] = (), **sampling: object) -> set[int]:
    """The allowed tokens behind ``output``, made by a worker that begins there."""
    grammars = make()
    add(grammars, spec("a", grammar, output, **sampling))
    return allowed(grammars.begin(["a"], [len(output)]).result())


def tokens_of(text: str) -> list[int]:
    return list(text.encode())


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", GRAMMARS)
def test_masks_are_the_same_after_a_move_and_a_rewind(name: str, seed: int) -> None:
    """At every position a worker that begins there, or that goes back there, has the mask of the undisturbed worker."""
    grammars, chance = make(), random.Random(seed)
    add(grammars, spec("a", GRAMMARS[name]))
    output: list[int] = []
    masks: list[set[int]] = []
    while len(output) < 60 and not (output and output[-1] in EOS_IDS):
        masks.append(allowed(grammars.begin(["a"], [len(output)]).result()))
        output.append(chance.choice(sorted(masks[-1])))
        grammars.append(["a"], output[-1:])
    assert len(output) > 1
    for position, expected in enumerate(masks):
        assert mask(GRAMMARS[name], output[:position]) == expected
    for position in chance.sample(range(len(masks)), min(20, len(masks))):
        again = make()
        add(again, spec("a", GRAMMARS[name], output))
        again.begin(["a"], [len(output)]).result()
        assert allowed(again.begin(["a"], [position]).result()) == masks[position]


def test_a_limit_is_met_at_the_same_position_after_a_move(monkeypatch: pytest.MonkeyPatch) -> None:
    """A grammar meets its limit in the middle of an answer, and does so in a worker that begins anywhere, too."""
    monkeypatch.setattr("actorserve.model_files.grammars._MAX_LEXER_STATES", 150)
    grammar, chance = lark("start: /([a-e]{1,40}[0-9]{1,30}){20,60}x/"), random.Random(1)
    grammars, output = make(), list[int]()
    add(grammars, spec("a", grammar))
    add(grammars, spec("b", lark('start: "b"+')))
    while (found := grammars.begin(["a", "b"], [len(output)] * 2).result()).failed == () and len(output) < 200:
        output.append(chance.choice(sorted(allowed(found))))
        grammars.append(["a", "b"], [output[-1], ord("b")])
    assert (found.rows, found.failed) == ((1,), (0,))
    assert allowed(found) == {ord("b"), END, EOT}
    assert len(output) > 1
    for position in range(len(output) + 1):
        again = make()
        add(again, spec("a", grammar, output[:position]))
        assert bool(again.begin(["a"], [position]).result().failed) == (position == len(output)), position


def test_masks_are_the_same_in_any_batch() -> None:
    """A row's mask does not depend on the other rows, and rows without a grammar have none."""
    grammars = make()
    outputs = {"schema": tokens_of('{"n'), "regex": tokens_of("abab"), "tree": tokens_of("((")}
    for name, output in outputs.items():
        add(grammars, spec(name, GRAMMARS[name], output))
    add(grammars, spec("free", ""))
    order = ["tree", "free", "schema", "regex"]
    found = grammars.begin(order, [len(outputs.get(name, ())) for name in order]).result()
    assert found.rows == (0, 2, 3)
    assert found.failed == ()
    assert found.allowed.shape == (3, -(-VOCAB_SIZE // 8))
    for index, row in enumerate(found.rows):
        assert allowed(found, index) == mask(GRAMMARS[order[row]], outputs[order[row]])


def test_only_the_end_follows_the_end_of_the_grammar() -> None:
    """Behind a complete text only end-of-sequence tokens and the request's own stop tokens are possible."""
    assert mask(lark('start: "ab"'), tokens_of("a")) == {ord("b")}
    assert mask(lark('start: "ab"'), tokens_of("ab")) == {END, EOT}
    assert mask(lark('start: "ab"'), tokens_of("ab"), stop_token_ids=(*EOS_IDS, 7)) == {END, EOT, 7}
    assert mask(lark('start: "ab"'), [*tokens_of("ab"), END, EOT]) == {END, EOT}
    assert 7 not in mask(lark('start: "ab"'), tokens_of("a"), stop_token_ids=(*EOS_IDS, 7))
    assert mask(lark('start: "a"+'), tokens_of("a")) == {ord("a"), END, EOT}


def test_a_stop_token_of_the_grammar_goes_on() -> None:
    """A stop token that is part of the text, below min_tokens, leads to what follows it in the grammar."""
    assert mask(lark('start: "a" ("b" "c")?'), tokens_of("ab"), stop_token_ids=(*EOS_IDS, ord("b"))) == {ord("c")}


def test_every_row_keeps_a_token() -> None:
    """Neither min_tokens nor ignoring the end leaves a row without tokens, and both keep the end away if they can."""
    early = {"min_tokens": 50}
    assert mask(lark('start: "a"+'), tokens_of("a"), **early) == {ord("a")}
    assert mask(lark('start: "a"'), tokens_of("a"), **early) == {END, EOT}
    assert mask(lark('start: "a"+'), tokens_of("a"), stop_token_ids=()) == {ord("a")}
    assert mask(lark('start: "a"'), tokens_of("a"), stop_token_ids=()) == {END, EOT}
    assert mask(lark('start: "a"'), [*tokens_of("a"), END, 7, EOT], stop_token_ids=(7,)) == {7}
    sampler = Sampler(VOCAB_SIZE, "cpu")
    request = spec("a", lark('start: "a"'), tokens_of("a"), temperature=0.0, **early)
    grammars = make()
    sampler.add(request)
    add(grammars, request)
    masks = grammars.begin(["a"], [1]).result()
    assert sampler(torch.zeros(1, VOCAB_SIZE), ["a"], [1], masks).token_ids == (END,)


BROKEN = {
    "invalid": (lark("start: ("), []),
    "another grammar's output": (lark('start: "a"'), tokens_of("b")),
    "no text at all": (json.dumps({"grammars": [{"json_schema": {"$ref": "#"}}]}), []),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_grammar_fails_alone(name: str) -> None:
    """A request whose grammar cannot go on fails, again and again, and its neighbours get their masks."""
    grammar, output = BROKEN[name]
    grammars = make()
    add(grammars, spec("bad", grammar, output))
    add(grammars, spec("good", lark('start: "a"')))
    for _ in range(2):
        found = grammars.begin(["bad", "good"], [len(output), 0]).result()
        assert (found.rows, found.failed) == ((1,), (0,))
        assert allowed(found) == {ord("a")}
    grammars.drop("bad")
    assert grammars.begin(["bad"], [0]).result().failed == ()


def test_unknown_history_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """A position behind tokens that the worker does not know is a bug, which fails the request and is logged."""
    grammars = make()
    add(grammars, spec("a", lark('start: "ab"')))
    assert grammars.begin(["a"], [1]).result().failed == (0,)
    assert "only 0 tokens are known" in caplog.text


class PanicException(BaseException):
    """As pyo3's, which is no Exception."""


@pytest.mark.parametrize(
    "error", [RuntimeError("oh"), MemoryError(), PanicException("oh")], ids=lambda e: type(e).__name__
)
def test_whatever_the_compiler_raises_fails_one_request(error: BaseException, caplog: pytest.LogCaptureFixture) -> None:
    """If the compiler raises an unknown error for a request, then that request fails alone, and a line is logged."""

    class Raises(GrammarCompiler):
        def compile(self, grammar: str) -> LLMatcher:
            if grammar == "bad":
                raise error
            return super().compile(grammar)

    grammars = Grammars(lambda: Raises(Vocabulary(TOKENS, EOS_IDS, EOS_IDS)), VOCAB_SIZE, EOS_IDS)
    add(grammars, spec("bad", "bad"))
    add(grammars, spec("good", lark('start: "a"')))
    found = grammars.begin(["bad", "good"], [0, 0]).result()
    assert (found.rows, found.failed) == ((1,), (0,))
    assert "request bad fails" in caplog.text
    grammars.append(["bad", "good"], [0, ord("a")])
    assert grammars.begin(["good"], [1]).result().failed == ()


def test_a_grammar_that_was_not_prepared_is_a_bug() -> None:
    """A request with a grammar cannot be added without its grammar, because its output would follow none."""
    with pytest.raises(ValueError, match="not prepared"):
        make().add(spec("a", lark('start: "a"')), None)


class Slow(GrammarCompiler):
    """A compiler that waits until the test lets it go, if a grammar has the word ``slow``."""

    def __init__(self) -> None:
        super().__init__(Vocabulary(TOKENS, EOS_IDS, EOS_IDS))
        self.go = threading.Event()
        self.compiled: list[str] = []

    def compile(self, grammar: str) -> LLMatcher:
        assert "slow" not in grammar or self.go.wait(20)
        self.compiled.append(grammar)
        return super().compile(grammar)


def test_a_known_grammar_does_not_wait_for_another_one() -> None:
    """While a grammar is being compiled, a request with a grammar that is compiled already is prepared."""
    slow = Slow()
    grammars = Grammars(lambda: slow, VOCAB_SIZE, EOS_IDS)
    known = lark('start: "a"+')
    add(grammars, spec("a", known))
    assert allowed(grammars.begin(["a"], [0]).result()) == {ord("a")}
    waits = grammars.prepare(spec("b", lark('start: "slow"')))
    assert waits is not None
    ready = grammars.prepare(spec("c", known, tokens_of("aa")))
    assert ready is not None
    ready.result(timeout=20)
    assert not waits.done()
    slow.go.set()
    waits.result(timeout=20)


def test_a_request_that_moves_is_prepared_up_to_its_next_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that comes with output costs its first step here one mask, as any other step."""
    num_masks = 0
    compute = grammar_state._compute

    def count(matcher: LLMatcher, words: Words) -> None:
        nonlocal num_masks
        num_masks += 1
        compute(matcher, words)

    monkeypatch.setattr(grammar_state, "_compute", count)
    grammars, grammar = make(), lark('start: "a"+')
    moved = spec("a", grammar, tokens_of("a" * 100))
    prepared = grammars.prepare(moved)
    assert prepared is not None
    prepared.result(timeout=20)
    assert num_masks > 1
    num_masks = 0
    grammars.add(moved, prepared)
    assert allowed(grammars.begin(["a"], [100]).result()) == {ord("a"), END, EOT}
    assert num_masks == 1


def test_an_equal_grammar_is_compiled_once_and_beside_the_caller() -> None:
    """Adding and beginning do not wait for the compiler, and requests with an equal grammar share its result."""
    slow = Slow()
    compiled = slow.compiled
    grammars = Grammars(lambda: slow, VOCAB_SIZE, EOS_IDS)
    for name in ("a", "b"):
        add(grammars, spec(name, lark('start: "slow"')))
    pending = grammars.begin(["a", "b"], [0, 0])
    assert compiled == []
    slow.go.set()
    assert len(pending.result().rows) == 2
    assert len(compiled) == 1
    for number in range(40):
        add(grammars, spec("c", lark(f'start: "{number}"')))
    add(grammars, spec("a", lark('start: "slow"')))
    grammars.begin(["a"], [0]).result()
    assert compiled.count(lark('start: "slow"')) == 2


def test_masks_choose_and_log_probabilities_stay_those_of_the_model() -> None:
    """A masked row chooses among its allowed tokens; other rows and all log-probabilities are as without masks."""
    source = torch.Generator().manual_seed(0)
    logits = torch.randn(3, VOCAB_SIZE, generator=source)
    usual: dict[str, Any] = {"top_logprobs": 2, "temperature": 0.0}
    requests = [spec("a", GRAMMARS["schema"], **usual), spec("b", "", **usual), spec("c", GRAMMARS["regex"], **usual)]
    grammars, sampler = make(), Sampler(VOCAB_SIZE, "cpu")
    for request in requests:
        add(grammars, request)
        sampler.add(request)
    masks = grammars.begin(["a", "b", "c"], [0, 0, 0]).result()
    found = sampler(logits.clone(), ["a", "b", "c"], [0, 0, 0], masks)
    free = sampler(logits.clone(), ["a", "b", "c"], [0, 0, 0])
    for row, index in ((0, 0), (2, 1)):
        best = max(sorted(allowed(masks, index)), key=lambda token, row=row: float(logits[row, token]))  # type: ignore[misc]
        assert found.token_ids[row] == best
    assert found.token_ids[1] == free.token_ids[1]
    for row in range(3):
        ours, plain = found.logprobs[row], free.logprobs[row]
        assert ours is not None
        assert plain is not None
        assert (ours.top_token_ids, ours.top_logprobs) == (plain.top_token_ids, plain.top_logprobs)
        exact = torch.log_softmax(logits[row].double(), -1)[found.token_ids[row]]
        assert ours.logprob == pytest.approx(float(exact), abs=1e-6)


def test_forced_text_is_written_in_the_models_own_tokens() -> None:
    """Where the grammar allows one text only, the model's tokenizer says in which tokens; else the longest tokens."""
    grammar = lark('start: "abc" /[0-9]/')
    assert mask(grammar) == {TOKENS.index(b"abc")}
    own = Grammars(
        lambda: GrammarCompiler(Vocabulary(TOKENS, EOS_IDS, EOS_IDS), lambda text: [ord(" "), *tokens_of(text)]),
        VOCAB_SIZE,
        EOS_IDS,
    )
    add(own, spec("a", grammar))
    assert allowed(own.begin(["a"], [0]).result()) == {ord("a")}


def test_a_long_forced_text_costs_no_more_than_a_short_one() -> None:
    """Of a text that the grammar forces, only the beginning is tokenized for each mask, with the same first token."""
    lengths: list[int] = []

    def encode(text: str) -> list[int]:
        lengths.append(len(text))
        return tokens_of(text)

    grammars = Grammars(lambda: GrammarCompiler(Vocabulary(TOKENS, EOS_IDS, EOS_IDS), encode), VOCAB_SIZE, EOS_IDS)
    text = "name" * 20_000
    add(grammars, spec("a", lark(f'start: "{text}"')))
    for position in range(70):
        assert allowed(grammars.begin(["a"], [position]).result()) == {ord(text[position])}
        grammars.append(["a"], [ord(text[position])])
    assert 0 < max(lengths) < 100
