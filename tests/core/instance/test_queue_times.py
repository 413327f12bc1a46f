"""What an instance tells of waiting: until a request's first iteration, and how many requests are in the batch."""

from dataclasses import replace

from actorserve.core.messages import LoadReport, Peer, PeerUp, Role, Start, Tick, Tokens
from tests.core.harness.driver import CONFIG, Instance, spec

COORDINATOR = Peer("coordinator", 1)


def waited(instance: Instance, name: str) -> float:
    """What the first tokens of a request said."""
    for message in instance.sent:
        if isinstance(message, Tokens) and name in message.request_ids:
            return message.waited_s[message.request_ids.index(name)] if message.waited_s else 0.0
    raise AssertionError(f"{name} has no token")


def test_the_wait_for_the_first_iteration_is_told_with_the_first_token() -> None:
    """A request that came while another one was computed waited until the next iteration began."""
    instance = Instance(replace(CONFIG, max_batch_requests=1))
    instance.start(spec("a", 6, max_tokens=1))
    instance.handle(Start(1, spec("b", 6, max_tokens=2)), 0.25)
    instance.done(now=1.0)
    instance.done(now=2.0)
    instance.done(now=3.0)
    assert (waited(instance, "a"), waited(instance, "b")) == (0.0, 0.75)
    last = instance.sent[-2]
    assert isinstance(last, Tokens)
    assert last.waited_s == ()


def test_reports_tell_how_many_requests_are_in_the_batch() -> None:
    """Of two requests only the one in the newest iteration counts, also when that has ended, and none at rest."""
    instance = Instance(replace(CONFIG, max_batch_requests=1))
    instance.handle(PeerUp(COORDINATOR, Role.COORDINATOR))
    instance.start(spec("a", 6, max_tokens=2))
    instance.start(spec("b", 6, max_tokens=2))

    def reported(now: float) -> tuple[int, int]:
        instance.handle(Tick(), now)
        report = next(message for message in reversed(instance.sent) if isinstance(message, LoadReport))
        return report.num_in_batch, report.num_running + report.num_waiting

    assert reported(0.5) == (1, 2)
    assert instance.state.load_report().num_in_batch == 1
    while instance.state.requests:
        instance.done(now=1.0)
    assert reported(2.0) == (0, 0)
