"""A model's forms of thoughts and calls are found out from its template."""

import pytest
from tokenizers import AddedToken, Tokenizer as Backend, models

from actorserve.errors import InvalidRequestError
from actorserve.http.chat.dialect import Dialect
from actorserve.http.chat.tools.call_form import CallForm, Functions
from actorserve.http.chat.tools.hermes import HERMES
from actorserve.http.chat.tools.llama3 import LLAMA3
from actorserve.http.chat.tools.mistral import MISTRAL_LIST, MISTRAL_NAMED
from actorserve.http.chat.tools.qwen3_coder import QWEN3_CODER
from actorserve.model_files.pieces import ByteLevelPieces
from actorserve.model_files.tokenizer import Tokenizer
from tests.http.chat.parsing import outline, parsed
from tests.http.fakes import TOKENIZER

QWEN = "{{ tools }}<tool_call>{% if enable_thinking %}</think>{% endif %}"
CALL = '<tool_call>{"name": "look", "arguments": {}}</tool_call>'
FUNCTIONS: Functions = {"look": None}
NO_PROMPT: list[int] = []
THINKING = TOKENIZER.encode("hello<|assistant|><think>\n")
TOOL = {"type": "function", "function": {"name": "look"}}


@pytest.mark.parametrize(
    ("template", "form"),
    [
        (QWEN, HERMES),
        ("{{ tools }} Environment: ipython", LLAMA3),
        ("{{ tools }} <|python_tag|>", LLAMA3),
        ("{{ tools }} [TOOL_CALLS]", MISTRAL_LIST),
        ("{{ tools }} [TOOL_CALLS] [ARGS]", MISTRAL_NAMED),
        ("{{ tools }} <tool_call>\n<function=...", QWEN3_CODER),
        ("{{ messages }}", HERMES),
        (None, HERMES),
    ],
)
def test_the_template_tells_the_form_of_calls(template: str | None, form: CallForm) -> None:
    """The markers in the template name the family, and models without tools get Hermes' form."""
    assert Dialect(template, TOKENIZER).call_form is form


def test_settings_overrule_the_template() -> None:
    """Both parsers can be named, or switched off."""
    named = Dialect("{{ messages }}", TOKENIZER, "llama3", "think")
    assert named.call_form is LLAMA3
    assert outline(parsed(lambda: named.parser(NO_PROMPT, FUNCTIONS), f"<think>Hm</think>{CALL}")) == ("Hm", CALL, [])
    off = Dialect(QWEN, TOKENIZER, "none", "none")
    assert off.call_form is None
    with pytest.raises(InvalidRequestError, match=r"^tools: "):
        off.check(FUNCTIONS)
    off.check({})
    assert outline(parsed(lambda: off.parser(NO_PROMPT, FUNCTIONS), f"<think>Hm</think>{CALL}")) == (
        "",
        f"<think>Hm</think>{CALL}",
        [],
    )


def test_the_parser_fits_the_request() -> None:
    """Calls are looked for in requests with tools, one or several, and thoughts where the template has them."""
    dialect = Dialect(QWEN, TOKENIZER)
    assert outline(parsed(lambda: dialect.parser(NO_PROMPT, {}), CALL)) == ("", CALL, [])
    assert outline(parsed(lambda: dialect.parser(NO_PROMPT, FUNCTIONS), 2 * CALL)) == ("", "", 2 * [("look", "{}")])
    one = lambda: dialect.parser(NO_PROMPT, FUNCTIONS, parallel=False)  # noqa: E731
    assert outline(parsed(one, 2 * CALL)) == ("", "", [("look", "{}")])
    assert outline(parsed(lambda: dialect.parser(THINKING, {}), "Hm</think>Yes")) == ("Hm", "Yes", [])
    not_thinking = TOKENIZER.encode("<think>\n\n</think>\n\n")
    assert outline(parsed(lambda: dialect.parser(not_thinking, {}), "Yes")) == ("", "Yes", [])


def test_a_template_with_tools_gets_them_as_an_argument() -> None:
    """A template that knows tools renders them itself, and another one gets them as text."""
    messages = [{"role": "user", "content": "Look."}]
    assert Dialect(QWEN, TOKENIZER).prepare(messages, [TOOL]) == (messages, {"tools": [TOOL]})
    assert Dialect(QWEN, TOKENIZER).prepare(messages, []) == (messages, {})
    (system, user), arguments = Dialect("{{ messages }}", TOKENIZER).prepare(messages, [TOOL])
    assert (system["role"], user, arguments) == ("system", messages[0], {})


def test_special_tokens_that_are_markers() -> None:
    """Only those markers are kept that are special tokens, and that the request needs."""
    backend = Backend(models.BPE())
    backend.add_special_tokens([AddedToken(text, special=True) for text in ("<s>", "<tool_call>", "<think>")])
    dialect = Dialect(QWEN, Tokenizer(backend, ByteLevelPieces()))
    assert dialect.marker_ids(with_tools=False) == {2}
    assert dialect.marker_ids(with_tools=True) == {1, 2}
    assert Dialect(QWEN, TOKENIZER).marker_ids(with_tools=True) == frozenset()


@pytest.mark.parametrize(
    ("template", "prompt", "functions", "or_answer", "start"),
    [
        ("", NO_PROMPT, FUNCTIONS, False, "(calls)"),
        ("", NO_PROMPT, FUNCTIONS, True, "(@answer | calls)"),
        (QWEN, NO_PROMPT, FUNCTIONS, False, "thoughts? (calls)"),
        (QWEN, THINKING, FUNCTIONS, True, "thoughts (@answer | calls)"),
        (QWEN, THINKING, {}, True, "thoughts (@answer)"),
    ],
)
def test_grammars(template: str, prompt: list[int], functions: Functions, or_answer: bool, start: str) -> None:
    """A grammar demands calls or an answer, and lets a thinking model think first."""
    dialect = Dialect(template, TOKENIZER)
    lark = dialect.grammar(prompt, functions, parallel=True, or_answer=or_answer)
    assert lark.splitlines()[0] == f"start: {start}"
