"""At level debug every message about a request is a line with the request's id, and with no text of clients."""

import json
import logging

import pytest

from actorserve.actors.request_lines import log_message
from actorserve.core.messages import (
    NEWCOMER,
    Close,
    Finished,
    FinishReason,
    HandOver,
    Heartbeat,
    Message,
    Open,
    Peer,
    Place,
    Placed,
    RefusalReason,
    Refused,
    Release,
    RequestSpec,
    SamplingParams,
    Start,
    Tokens,
)
from actorserve.logs import JsonLines

PEER = Peer("worker-0", 1)
SPEC = RequestSpec("mine.1-0", (7, 8), SamplingParams(seed=1, max_tokens=5), client="team", cache_salt="secret-salt")
ABOUT_ONE: list[tuple[Message, dict[str, object]]] = [
    (Open(SPEC), {"key": "team", "prompt_tokens": 2, "max_tokens": 5}),
    (Start(2, SPEC), {"epoch": 2, "with_kv": False}),
    (Place("mine.1-0", 1, 9), {"num_tokens": 9}),
    (Placed("mine.1-0", 1, PEER, 0.5), {"worker": "worker-0", "waited_s": 0.5}),
    (Refused("mine.1-0", 1, RefusalReason.OVERLOADED, 1.0), {"reason": "overloaded"}),
    (Finished("mine.1-0", 1, FinishReason.STOP, 4), {"reason": "stop", "output_tokens": 4}),
    (Release("mine.1-0", 1), {"epoch": 1}),
    (Close("mine.1-0"), {}),
]


@pytest.mark.parametrize(("message", "told"), ABOUT_ONE)
def test_a_message_about_a_request_is_a_line(
    caplog: pytest.LogCaptureFixture, message: Message, told: dict[str, object]
) -> None:
    """The line names the message, the peer and the request, and no salt and no tokens."""
    caplog.set_level(logging.DEBUG, logger="actorserve.requests")
    log_message("to", PEER, message)
    (record,) = caplog.records
    line = json.loads(JsonLines("p").format(record))
    assert line["message"] == f"{type(message).__name__} to worker-0"
    assert line["request_id"] == "mine.1-0"
    assert told.items() <= line.items()
    assert "secret-salt" not in json.dumps(line)


def test_a_hand_over_names_the_next_worker(caplog: pytest.LogCaptureFixture) -> None:
    """A migration's commit is a line, too; a message of the process itself names no peer."""
    caplog.set_level(logging.DEBUG, logger="actorserve.requests")
    log_message("from", None, HandOver("r", 1, PEER, None, 3, NEWCOMER))
    assert [record.getMessage() for record in caplog.records] == ["HandOver"]


@pytest.mark.parametrize("message", [Heartbeat(), Tokens(("r",), (1,), (0,), (7,))])
def test_other_messages_are_no_lines(caplog: pytest.LogCaptureFixture, message: Message) -> None:
    """Tokens and messages that are not about one request are not logged."""
    caplog.set_level(logging.DEBUG, logger="actorserve.requests")
    log_message("to", PEER, message)
    assert caplog.records == []


def test_lines_are_off_by_default(caplog: pytest.LogCaptureFixture) -> None:
    """Above level debug there are no such lines."""
    caplog.set_level(logging.INFO, logger="actorserve.requests")
    log_message("to", PEER, Release("r", 1))
    assert caplog.records == []
