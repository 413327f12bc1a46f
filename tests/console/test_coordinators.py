"""A console of a cluster with several coordinators: it finds the one that serves, and acts only there."""

import pytest

from actorserve.console.coordinators import Coordinators
from actorserve.core.messages import Answer, Command, Outcome
from tests.console.server import FakeServer, silent

SHORT_S = 0.3
LONG_S = 10.0


def standby(command: Command) -> Answer:
    return Answer(command.command_id, Outcome.STANDBY, "this is a standby: beta/coordinator serves, in term 2")


def standing_by() -> FakeServer:
    return FakeServer(status=standby, workers=standby, drain=standby)


@pytest.mark.parametrize("verb", ["workers", "audit", "drain"])
def test_the_coordinator_that_serves_answers(verb: str) -> None:
    """A standby, and one that is gone, are passed over; the next command goes straight to the one that serves. A
    standby would answer some questions, such as about its own audit file, but is not asked.
    """
    gone, other, serving = FakeServer(status=silent, workers=silent, drain=silent), standing_by(), FakeServer()
    coordinators = Coordinators([gone, other, serving])
    answer = coordinators.ask(Command("1", verb, ("alpha",)), LONG_S)
    assert answer is not None
    assert answer.outcome is Outcome.DONE
    num_asked = len(gone.asked), len(other.asked)
    coordinators.ask(Command("2", verb, ("alpha",)), LONG_S)
    assert (len(gone.asked), len(other.asked)) == num_asked


def test_an_act_is_sent_once() -> None:
    """A coordinator that dies with an act may have done it, so no other one gets it."""
    dies, serves = FakeServer(drain=silent), FakeServer()
    assert Coordinators([dies, serves]).ask(Command("1", "drain", ("alpha",)), SHORT_S) is None
    assert dies.verbs == ["status", "drain"]
    assert serves.verbs == []


def test_standbys_alone_say_so() -> None:
    """Without a coordinator that serves the standby's answer is the answer, and nothing is done."""
    one, two = standing_by(), standing_by()
    answer = Coordinators([one, two]).ask(Command("1", "drain", ("alpha",)), SHORT_S)
    assert answer is not None
    assert answer.outcome is Outcome.STANDBY
    assert "drain" not in {*one.verbs, *two.verbs}


def test_a_takeover_is_waited_for() -> None:
    """A coordinator that begins to serve within the time is found."""
    waits = FakeServer()
    waits.answers["status"] = lambda command: (
        standby(command) if len(waits.asked) < 3 else Answer(command.command_id, Outcome.DONE)
    )
    answer = Coordinators([waits, standing_by()]).ask(Command("1", "workers"), LONG_S)
    assert answer is not None
    assert answer.outcome is Outcome.DONE
