"""Tools as plain text, for templates that know none."""

from actorserve.http.chat.tools.hermes import HERMES
from actorserve.http.chat.tools.prompt import with_tools_as_text

TOOL = {"type": "function", "function": {"name": "look", "description": "Looks — about"}}
USER = {"role": "user", "content": "Look."}
CALL = {"id": "1", "type": "function", "function": {"name": "look", "arguments": {"at": "x"}}}
WRITTEN = '<tool_call>\n{"name": "look", "arguments": {"at": "x"}}\n</tool_call>'


def test_tools_are_described_in_the_system_message() -> None:
    """The description follows the system's own text, and makes a system message where there is none."""
    (alone, user) = with_tools_as_text([USER], [TOOL], HERMES)
    assert (alone["role"], user) == ("system", USER)
    assert '"Looks — about"' in str(alone["content"])
    assert '<tool_call>\n{"name": "NAME", "arguments": ' in str(alone["content"])
    (system, _) = with_tools_as_text([{"role": "system", "content": "Be kind."}, USER], [TOOL], HERMES)
    assert system["content"] == f"Be kind.\n\n{alone['content']}"


def test_calls_and_results_become_text() -> None:
    """Calls stand in the assistant's text as the model wrote them, and the user gives the results of a row of calls."""
    calls = {"role": "assistant", "content": "I look.", "tool_calls": [CALL, CALL]}
    results = [{"role": "tool", "tool_call_id": "1", "content": content} for content in ("Tree", "Sky")]
    plain = with_tools_as_text([USER, calls, *results, {**calls, "content": ""}, USER], [], HERMES)
    assert plain == [
        USER,
        {"role": "assistant", "content": f"I look.\n{WRITTEN}\n{WRITTEN}"},
        {"role": "user", "content": "<tool_response>\nTree\n</tool_response>\n<tool_response>\nSky\n</tool_response>"},
        {"role": "assistant", "content": f"{WRITTEN}\n{WRITTEN}"},
        USER,
    ]


def test_a_plain_chat_stays_as_it_is() -> None:
    """Without tools nothing changes."""
    messages = [USER, {"role": "assistant", "content": "No."}]
    assert with_tools_as_text(messages, [], HERMES) == messages
