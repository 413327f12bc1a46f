"""The log of what happened to the last requests."""

import tracemalloc

from actorserve.core.operations.request_log import MAX_NOTES, MAX_REQUESTS, MAX_SHOWN, RequestLog


def _rows(log: RequestLog, request_id: str, now: float = 100.0) -> list[tuple[float, str, str]]:
    ago_s, events, texts, _ = log.table([request_id], now)
    return list(zip(ago_s.numbers, events.texts, texts.texts, strict=True))


def test_notes_come_back_as_they_were_made() -> None:
    """A request's notes have their times, events and texts, the oldest first, whatever characters they contain."""
    log = RequestLog()
    log.note("one", 1.5, "came", "5 prompt tokens")
    log.note("two", 2.0, "came")
    log.note("one", 2.25, "", "größer\0\ud800")
    assert _rows(log, "one") == [(98.5, "came", "5 prompt tokens"), (97.75, "", "größer\0?")]
    assert _rows(log, "two") == [(98.0, "came", "")]
    assert ("one" in log, "three" in log, _rows(log, "three")) == (True, False, [])


def test_a_request_is_found_by_the_id_that_its_client_knows() -> None:
    """The client's id names all choices of the client's requests, the whole id one, and half a word none."""
    log = RequestLog()
    for request_id in ("mine.a1-0", "mine.a1-1", "mine", "mine.b2-0", "yours.c3-0", "yours.c3-1"):
        log.note(request_id, 1.0, "came")
    called = [log.called(name) for name in ("yours", "yours.c3-1", "mine", "your", "")]
    assert called == [["yours.c3-0", "yours.c3-1"], ["yours.c3-1"], ["mine"], [], []]
    assert log.table(called[0], 1.0)[-1].texts == ("yours.c3-0", "yours.c3-1")


def test_of_many_requests_with_one_name_the_newest_are_shown() -> None:
    """A client that names all its requests alike fills no answer."""
    log = RequestLog()
    for number in range(MAX_SHOWN + 4):
        log.note(f"same.{number}-0", 0.0, "came")
    assert log.called("same") == [f"same.{number}-0" for number in range(4, MAX_SHOWN + 4)]


def test_the_requests_that_came_first_are_forgotten() -> None:
    """Of more requests than the log holds, the newest stay; a note of an old request does not make it newer."""
    log = RequestLog()
    for number in range(MAX_REQUESTS):
        log.note(str(number), 0.0, "came")
    log.note("1", 0.0, "placed")
    for number in range(MAX_REQUESTS, MAX_REQUESTS + 3):
        log.note(str(number), 0.0, "came")
    assert [number for number in range(MAX_REQUESTS + 3) if str(number) not in log] == [0, 1, 2]


def test_of_many_notes_the_first_half_and_the_newest_stay() -> None:
    """A request with too many notes keeps how it began, and what happened last."""
    log = RequestLog()
    for number in range(MAX_NOTES + 10):
        log.note("one", 0.0, str(number))
    half = MAX_NOTES // 2
    kept = [int(event) for _, event, _ in _rows(log, "one")]
    assert kept == [*range(half), *range(half + 10, MAX_NOTES + 10)]


def test_a_request_takes_little_memory() -> None:
    """A full log of usual requests takes less than 512 bytes a request."""
    log = RequestLog()
    tracemalloc.start()
    try:
        for number in range(MAX_REQUESTS):
            request_id = f"chatcmpl-{number:032d}"
            for event, text in (("came", "120 prompt tokens"), ("placed", "on worker-0"), ("ended", "stop, 50 tokens")):
                log.note(request_id, float(number), event, text)
            log.note(request_id, float(number), "first token", f"worker-{number}")
        used = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert used < 512 * MAX_REQUESTS
