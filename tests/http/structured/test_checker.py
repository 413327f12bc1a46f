"""Grammars that clients ask for: each is made and checked, and a hostile one harms nobody."""

import asyncio
import json
import os
import signal
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from actorserve.core.messages import MAX_GRAMMAR_BYTES
from actorserve.errors import InvalidRequestError
from actorserve.http.structured.checker import GrammarChecker
from actorserve.http.structured.grammars import Grammars
from actorserve.model_files.grammars import GrammarCompiler, vocabulary_of
from tests.http.fakes import END, TOKENIZER, VOCAB_SIZE, client_for, says

VOCABULARY = vocabulary_of(TOKENIZER, VOCAB_SIZE + 3, (END, END + 1, 10**6))
Ask = Callable[[Grammars], Coroutine[Any, Any, str]]


@pytest.fixture
def grammars() -> Grammars:
    return Grammars(GrammarChecker(lambda: VOCABULARY, cpu_s=1.0))


def accepts(grammar: str, text: str) -> bool:
    """Whether the grammar allows exactly this text."""
    matcher = GrammarCompiler(VOCABULARY).compile(grammar)
    tokens = TOKENIZER.encode(text, add_special_tokens=False)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


PERSON = {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}, "required": ["age"]}
KINDS: list[tuple[Ask, list[str], list[str]]] = [
    (lambda g: g.from_schema(PERSON, "p"), ['{"age":5}', '{"name": "A",\n "age" : 5}'], ['{"age":"x"}', "{}"]),
    (lambda g: g.from_schema(PERSON, "p", ""), ['{"age":5}'], ['{"age": 5}']),
    (lambda g: g.from_schema(PERSON, "p", "[ ]"), ['{"age": 5}'], ['{"age":  5}', '{"age":\n5}']),
    (lambda g: g.from_schema(PERSON, "p"), ['{"age":' + " " * 40 + "5}"], ['{"age":' + " " * 41 + "5}"]),
    (lambda g: g.from_schema({"oneOf": [{"type": "null"}, {"enum": [1, "é"]}]}, "p"), ["null", "1", '"é"'], ["2"]),
    (lambda g: g.from_regex(r"\d{3}-\w/?", "p"), ["123-a", "123-a/"], ["12-a", "123-é", "١٢٣-a"]),
    (lambda g: g.from_regex("^(a|b\n)$", "p"), ["a", "b\n"], ["ab", "b"]),
    (
        lambda g: g.from_choices(["yes", "yes, but", 'q"\\\n', "é"], "p"),
        ["yes", "yes, but", 'q"\\\n', "é"],
        ["no", "y"],
    ),
    (lambda g: g.from_ebnf('root ::= "a" [0-9]+', "p"), ["a1", "a12"], ["a", "b1"]),
    (lambda g: g.from_ebnf('start: "a" B\nB: /[0-9]+/', "p"), ["a1", "a12"], ["a", "b1"]),
    (lambda g: g.from_lark('start: "f(" %json {"type": "integer"} ")"', "p"), ["f(5)"], ["f()", "5"]),
    (lambda g: g.from_lark('start: <|user|> "a"', "p"), ["<|user|>a"], ["a", "<|end|>a"]),
]


@pytest.mark.parametrize(("ask", "allowed", "forbidden"), KINDS)
async def test_each_kind_allows_what_it_says(
    grammars: Grammars, ask: Ask, allowed: list[str], forbidden: list[str]
) -> None:
    """A schema, a regular expression, choices, GBNF and Lark become grammars of exactly their texts."""
    grammar = await ask(grammars)
    assert isinstance(json.loads(grammar)["grammars"], list)
    assert [text for text in allowed if not accepts(grammar, text)] == []
    assert [text for text in forbidden if accepts(grammar, text)] == []


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def rules(number: int) -> str:
    lines = [f"r{index}: r{index + 1} r{index + 1}" for index in range(number)]
    return "\n".join(["start: r0", *lines, f'r{number}: "a"'])


PROPERTIES = {f"p{index}": {"type": "integer"} for index in range(6000)}
HOSTILE: dict[str, tuple[Ask, str]] = {
    "a regex with an error": (lambda g: g.from_regex("a(", "p"), "unclosed group"),
    "a regex that looks ahead": (lambda g: g.from_regex("a(?=b)", "p"), "look-around"),
    "deep brackets in a regex": (lambda g: g.from_regex("(" * 50_000 + "a" + ")" * 50_000, "p"), ""),
    "deep brackets in Lark": (lambda g: g.from_lark("start: " + "(" * 50_000 + '"a"' + ")" * 50_000, "p"), "deep"),
    "deep brackets in GBNF": (lambda g: g.from_ebnf("root ::= " + "(" * 50_000 + '"a"' + ")" * 50_000, "p"), "deep"),
    "a chain of rules": (lambda g: g.from_lark(rules(5000), "p"), "too much time or memory"),
    "terminals that double": (
        lambda g: g.from_lark(
            "\n".join(line.upper() for line in rules(60).splitlines()).replace("START", "start"), "p"
        ),
        "",
    ),
    "a token that does not exist": (lambda g: g.from_lark("start: <|nobody|>", "p"), "unknown special token"),
    "a deep schema": (lambda g: g.from_schema(nested(400), "p"), ""),
    "a schema that is only itself": (lambda g: g.from_schema({"$ref": "#"}, "p"), ""),
    "a reference to the web": (lambda g: g.from_schema({"$ref": "http://127.0.0.1/x"}, "p"), ""),
    "branches that multiply": (
        lambda g: g.from_schema(
            {"allOf": [{"anyOf": [{"properties": {f"p{i}-{j}": {}}} for j in range(9)]} for i in range(9)]}, "p"
        ),
        "too large",
    ),
    "thousands of properties": (lambda g: g.from_schema({"properties": PROPERTIES}, "p"), ""),
    "alternatives that are too many behind the beginning": (
        lambda g: g.from_lark(
            f"start: /[a-z]{{9}}/ many\nmany: {' | '.join(json.dumps(f'{number}.') for number in range(5000))}", "p"
        ),
        "items",
    ),
    "optional parts that are too many": (
        lambda g: g.from_lark("start: /[a-z]{400}/ many\nmany: " + "/[a-z]+/? " * 8000, "p"),
        "too big",
    ),
    "a costly number": (lambda g: g.from_schema({"type": "integer", "multipleOf": 1_000_003}, "p"), "too much time"),
    "a keyword that is not supported": (lambda g: g.from_schema({"type": "array", "uniqueItems": True}, "p"), "unique"),
    "branches of oneOf that overlap": (
        lambda g: g.from_schema({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "p"),
        "oneOf",
    ),
    "a huge list of values": (lambda g: g.from_schema({"enum": ["x" * 99] * 10_000}, "p"), "larger than"),
    "a huge regex": (lambda g: g.from_regex("a" * (MAX_GRAMMAR_BYTES + 1), "p"), "larger than"),
    "half a character": (lambda g: g.from_choices(["\ud800"], "p"), ""),
}


@pytest.mark.parametrize("attack", HOSTILE)
async def test_a_hostile_grammar_is_refused_by_name(grammars: Grammars, attack: str) -> None:
    """A wrong, exploding or oversized grammar is refused with a short reason, and the next grammar is served."""
    ask, reason = HOSTILE[attack]
    with pytest.raises(InvalidRequestError) as refused:
        await ask(grammars)
    assert refused.value.param == "p"
    assert reason in str(refused.value)
    assert len(str(refused.value)) < 300
    assert await grammars.from_choices(["a"], "p")


async def test_a_long_text_is_no_attack(grammars: Grammars) -> None:
    """A grammar that allows nothing but a very long text is served, because only its beginning is tokenized."""
    text = "yes, but " * 20_000
    assert accepts(await grammars.from_choices([text], "p"), text)
    assert await grammars.from_lark(f"start: {json.dumps(text)}", "p")


async def test_the_event_loop_goes_on_while_grammars_are_checked(grammars: Grammars) -> None:
    """While costly grammars are checked, no turn of the event loop takes long."""
    await grammars.from_choices(["warm"], "p")
    asked = [
        asyncio.ensure_future(grammars.from_schema({"type": "integer", "multipleOf": 1_000_003 + index}, "p"))
        for index in range(3)
    ]
    longest_s = 0.0
    while not all(one.done() for one in asked):
        began = time.thread_time()
        await asyncio.sleep(0.001)
        longest_s = max(longest_s, time.thread_time() - began)
    assert longest_s < 0.05
    assert all(isinstance(error, InvalidRequestError) for error in await asyncio.gather(*asked, return_exceptions=True))


async def test_a_grammar_is_checked_once(grammars: Grammars) -> None:
    """An equal grammar is not checked again, whether it was accepted or refused."""
    for _ in range(2):
        assert await grammars.from_choices(["a"], "p")
        with pytest.raises(InvalidRequestError):
            await grammars.from_regex("(", "p")
    os.kill(process_of(grammars), signal.SIGSTOP)  # so that another check would not be answered
    try:
        async with asyncio.timeout(5):
            assert await grammars.from_choices(["a"], "q")
            with pytest.raises(InvalidRequestError, match=r"^q: "):
                await grammars.from_regex("(", "q")
    finally:
        os.kill(process_of(grammars), signal.SIGCONT)


async def test_the_process_is_started_again(grammars: Grammars) -> None:
    """After the checking process has died, the next check starts another one."""
    assert await grammars.from_choices(["a"], "p")
    first = process_of(grammars)
    os.kill(first, signal.SIGKILL)
    await asyncio.to_thread(os.waitid, os.P_PID, first, os.WEXITED | os.WNOWAIT)
    assert await grammars.from_choices(["b"], "p")
    assert process_of(grammars) != first


async def test_a_model_without_an_end_serves_no_grammar() -> None:
    """Without an end-of-sequence token an answer could not end, so grammars are refused with that reason."""
    grammars = Grammars(GrammarChecker(lambda: vocabulary_of(TOKENIZER, VOCAB_SIZE, ()), cpu_s=1.0))
    with pytest.raises(InvalidRequestError, match="no end-of-sequence token"):
        await grammars.from_choices(["a"], "p")


def process_of(grammars: Grammars) -> int:
    process = grammars._checker._process
    assert process is not None
    return process._process.pid


BODIES: list[tuple[dict[str, Any], list[str]]] = [
    ({"response_format": {"type": "text"}}, []),
    ({"response_format": None, "structured_outputs": None}, []),
    ({"response_format": {"type": "json_object"}}, ['{"a": [1]}', "{}"]),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": PERSON, "strict": True}}},
        ['{"age":5}'],
    ),
    ({"structured_outputs": {"json": PERSON}}, ['{"age":5}']),
    ({"structured_outputs": {"json": json.dumps(PERSON)}}, ['{"age":5}']),
    ({"structured_outputs": {"json_object": True, "disable_any_whitespace": True}}, ['{"a":1}']),
    ({"structured_outputs": {"regex": "[ab]+"}}, ["aba"]),
    ({"structured_outputs": {"choice": ["yes", "no"]}}, ["yes", "no"]),
    ({"structured_outputs": {"grammar": 'root ::= "a"'}}, ["a"]),
    ({"guided_choice": ["yes", "no"]}, ["yes", "no"]),
    ({"guided_json": PERSON, "guided_whitespace_pattern": "[ ]"}, ['{"age": 5}']),
]


@pytest.mark.parametrize(
    "prompt", [{"prompt": "hi"}, {"messages": [{"role": "user", "content": "hi"}]}], ids=["completion", "chat"]
)
@pytest.mark.parametrize(("fields", "allowed"), BODIES)
async def test_a_request_gets_its_grammar(prompt: dict[str, Any], fields: dict[str, Any], allowed: list[str]) -> None:
    """OpenAI's and vLLM's fields give the workers' request its grammar; ``text`` and null give none."""
    service = says("a")
    route = "chat/completions" if "messages" in prompt else "completions"
    async with client_for(service) as client:
        response = await client.post(f"/v1/{route}", json={"max_tokens": 3} | prompt | fields)
    assert response.status_code == 200, response.text
    (spec,) = service.specs
    assert bool(spec.sampling.grammar) == bool(allowed)
    assert [text for text in allowed if not accepts(spec.sampling.grammar, text)] == []


async def test_two_ways_of_asking_are_refused() -> None:
    """A request that asks for structure in two fields is a 400 that names one of them."""
    both = {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}
    async with client_for(says("a")) as client:
        for fields in (both, {"structured_outputs": {"regex": "a"}, "guided_regex": "a"}):
            response = await client.post("/v1/completions", json={"prompt": "hi"} | fields)
            assert response.status_code == 400
            assert response.json()["error"]["param"] == "structured_outputs"
