"""What a family's prompts, grammar and parser say of its calls agrees."""

import json

import pytest
from hypothesis import given, strategies as st
from llguidance import LLMatcher, LLTokenizer

from actorserve.http.chat.reasoning import Thoughts
from actorserve.http.chat.tools.call_form import CallForm, Functions
from actorserve.http.chat.tools.grammar import calls_grammar, text_grammar, thoughts_grammar
from actorserve.http.chat.tools.hermes import HERMES
from actorserve.http.chat.tools.llama3 import LLAMA3
from actorserve.http.chat.tools.mistral import MISTRAL_LIST, MISTRAL_NAMED
from actorserve.http.chat.tools.qwen3_coder import QWEN3_CODER
from tests.http.chat.parsing import outline, parsed

FORMS = pytest.mark.parametrize("form", [HERMES, QWEN3_CODER, LLAMA3, MISTRAL_LIST, MISTRAL_NAMED])
FUNCTIONS: Functions = {
    "look": {"properties": {"at": {"type": "string"}}, "required": ["at"], "additionalProperties": False},
    "go": None,
}
CALLS = [("look", '{"at": "x"}'), ("go", "{}")]
BYTES = LLTokenizer("byte")  # its special token has the id 256


def no_special_token(_: str) -> None:
    return None


def accepts(rules: str, text: str, special: tuple[int, ...] = ()) -> bool:
    """Whether the grammar accepts exactly these special tokens and then this text."""
    grammar = json.dumps({"grammars": [{"lark_grammar": rules}]})
    assert LLMatcher.validate_grammar(grammar, BYTES) == ""
    matcher = LLMatcher(BYTES, grammar)
    token_ids = [*special, *BYTES.tokenize_str(text)]
    return bool(matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting())


@FORMS
@given(
    calls=st.lists(
        st.tuples(
            st.sampled_from(sorted(FUNCTIONS)), st.dictionaries(st.text(), st.text(), max_size=2).map(json.dumps)
        ),
        min_size=1,
        max_size=3,
    )
)
def test_written_calls_are_read(form: CallForm, calls: list[tuple[str, str]]) -> None:
    """The parser of a form reads the calls that the form writes."""
    assert outline(parsed(lambda: form.new_reader(FUNCTIONS), form.write(calls))) == ("", "", calls)


@FORMS
def test_the_grammar_allows_the_calls_of_the_functions(form: CallForm) -> None:
    """The grammar accepts the form's own text, for these functions and arguments only, and several calls if wanted."""
    several = "start: calls\n" + calls_grammar(FUNCTIONS, form, no_special_token, parallel=True)
    one = "start: calls\n" + calls_grammar(FUNCTIONS, form, no_special_token, parallel=False)
    assert accepts(several, form.write(CALLS))
    assert accepts(one, form.write(CALLS[:1]))
    assert not accepts(one, form.write(CALLS))
    for grammar in (several, one):
        assert not accepts(grammar, form.write([("look", "{}")]))
        assert not accepts(grammar, form.write([("go", '{"at": "x"}')]))
        assert not accepts(grammar, form.write([("fly", "{}")]))
        assert not accepts(grammar, "No.")


@FORMS
@pytest.mark.parametrize("arguments", ['{"at":"x"}', '{"at": "x"}', '{ "at" : "x" }'])
def test_arguments_may_have_single_spaces(form: CallForm, arguments: str) -> None:
    """The grammar accepts arguments with a space between their parts, and without."""
    rules = "start: calls\n" + calls_grammar(FUNCTIONS, form, no_special_token, parallel=True)
    assert accepts(rules, form.write([("look", arguments)]))


@FORMS
@pytest.mark.parametrize("space", ["  ", "\n", "\t"])
def test_arguments_have_no_other_white_space(form: CallForm, space: str) -> None:
    """The grammar refuses more white space, because a small model would write it until it is cut off."""
    rules = "start: calls\n" + calls_grammar(FUNCTIONS, form, no_special_token, parallel=True)
    assert not accepts(rules, form.write([("look", f'{{"at":{space}"x"}}')]))


@FORMS
@pytest.mark.parametrize("begun", [False, True])
def test_the_model_may_think_before_forced_calls(form: CallForm, begun: bool) -> None:
    """The grammar accepts any thoughts up to their marker, and the parsers read them."""
    rules = [
        "start: thoughts calls",
        calls_grammar(FUNCTIONS, form, no_special_token, parallel=True),
        thoughts_grammar(no_special_token, begun=begun),
    ]
    thoughts = "Hm <call>\n</thin"
    text = f"{'' if begun else '<think>'}{thoughts}</think>\n\n{form.write(CALLS)}"
    assert accepts("\n".join(rules), text)
    assert outline(parsed(lambda: Thoughts(form.new_reader(FUNCTIONS), begun=begun), text)) == (thoughts, "", CALLS)


@FORMS
def test_white_space_in_forced_calls_is_bounded(form: CallForm) -> None:
    """At most 40 spaces stand behind thoughts, and one inside arguments, so no forced call is spaces for ever."""
    rules = [
        "start: thoughts calls",
        calls_grammar(FUNCTIONS, form, no_special_token, parallel=True),
        thoughts_grammar(no_special_token, begun=True),
    ]
    for behind, inside, is_allowed in ((40, 1, True), (41, 1, False), (40, 2, False)):
        call = form.write([("look", '{"at":' + inside * " " + '"x"}')])
        assert accepts("\n".join(rules), f"</think>{behind * ' '}{call}") == is_allowed


@FORMS
@pytest.mark.parametrize(("more", "is_allowed"), [({}, False), ({"additionalProperties": True}, True)])
def test_arguments_that_no_schema_names_are_not_made_up(
    form: CallForm, more: dict[str, bool], is_allowed: bool
) -> None:
    """A forced call has further arguments only if the function's schema says so, because the client knows no others."""
    functions = {"look": {"type": "object", "properties": {"at": {"type": "string"}}} | more}
    rules = "start: calls\n" + calls_grammar(functions, form, no_special_token, parallel=True)
    assert accepts(rules, form.write([("look", '{"at":"x"}')]))
    assert accepts(rules, form.write([("look", '{"at":"x","style":"y"}')])) == is_allowed


def test_markers_may_be_special_tokens() -> None:
    """Where a marker is a special token, the grammar demands that token in place of its text."""
    rules = "start: calls\n" + calls_grammar(FUNCTIONS, MISTRAL_LIST, {"[TOOL_CALLS]": 256}.get, parallel=True)
    text = MISTRAL_LIST.write(CALLS)
    assert accepts(rules, text.removeprefix("[TOOL_CALLS]"), special=(256,))
    assert not accepts(rules, text)


@pytest.mark.parametrize("form", [HERMES, MISTRAL_LIST, MISTRAL_NAMED])
def test_calls_in_a_text_follow_their_schemas(form: CallForm) -> None:
    """The grammar accepts any text without calls, and in a text only calls of these functions and arguments."""
    rules = "start: text\n" + text_grammar(FUNCTIONS, form, no_special_token)
    assert accepts(rules, "")
    assert accepts(rules, "No {calls} <tool_cal [TOOL_CALL\n/here")
    assert accepts(rules, form.write(CALLS))
    assert accepts(rules, f"I look.\n{form.write(CALLS)}\nAgain: {form.write(CALLS[1:])} Done.")
    for wrong in (("look", "{}"), ("go", '{"at": "x"}'), ("fly", "{}")):
        assert not accepts(rules, f"I look. {form.write([wrong])}")
        assert not accepts(rules, form.write([*CALLS, wrong]))


def test_calls_in_a_text_may_begin_with_a_special_token() -> None:
    """Where the trigger is a special token, that token begins the calls, and no text spells it."""
    rules = "start: text\n" + text_grammar(FUNCTIONS, MISTRAL_LIST, {"[TOOL_CALLS]": 256}.get)
    assert accepts(rules, "No calls.")
    assert accepts(rules, MISTRAL_LIST.write(CALLS).removeprefix("[TOOL_CALLS]"), special=(256,))
    assert not accepts(rules, MISTRAL_LIST.write([("fly", "{}")]).removeprefix("[TOOL_CALLS]"), special=(256,))
    assert not accepts(rules, MISTRAL_LIST.write([("fly", "{}")]))
