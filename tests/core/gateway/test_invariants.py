"""``GatewayState.validate`` finds a session that was broken by hand, and says what is wrong with it."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from actorserve.core.gateway.fallback import FallbackPlacer
from actorserve.core.gateway.session import SessionStage
from actorserve.core.gateway.state import GatewayState
from actorserve.core.messages import Attained, Checkpointed, HandOver, PeerDown, Transfer
from tests.core.harness.driver import checkpoint_id, migration_id
from tests.core.harness.gateway import A, B, opened, running, tokens


def with_output() -> GatewayState:
    """r runs on A, and its client has the tokens 7 and 8."""
    gateway = running(A, B)
    gateway.handle(tokens(1, 0, 7), 0.0, A)
    gateway.handle(tokens(1, 1, 8), 0.0, A)
    return gateway.state


def _go_back_to_placing(state: GatewayState) -> None:
    session = state.sessions["r"]
    session.stage, session.instance = SessionStage.PLACING, None


def _place_twice(state: GatewayState) -> None:
    state._placer.fallback = FallbackPlacer(state.config, state.peers, 0.0)


BROKEN: list[tuple[Callable[[GatewayState], object], str]] = [
    (lambda state: setattr(state.sessions["r"], "epoch", 0), "went back from epoch 1 to 0"),
    (lambda state: state.sessions["r"].output.pop(), "tokens that the client has were changed"),
    (lambda state: state.sessions["r"].output.insert(0, 9), "tokens that the client has were changed"),
    (lambda state: state.peers.workers.pop(A), "its owner is not up"),
    (lambda state: setattr(state.sessions["r"], "instance", None), "its owner is not up"),
    (_go_back_to_placing, "lost its owner without a new epoch"),
    (lambda state: setattr(state.sessions["r"], "stage", SessionStage.PLACING), "was not started there"),
    (
        lambda state: setattr(state.sessions["r"], "hand_over", HandOver("r", 1, B, migration_id(), 2, Attained())),
        "waits for no token",
    ),
    (
        lambda state: setattr(state.sessions["r"], "hand_over", HandOver("r", 2, B, migration_id(), 9, Attained())),
        "under another epoch",
    ),
    (
        lambda state: setattr(state.sessions["r"], "checkpointed", Checkpointed("r", 2, B, checkpoint_id())),
        "of another epoch",
    ),
    (lambda state: state.sessions.update(s=state.sessions["r"]), "under another request's id"),
    (_place_twice, "both place requests"),
]


@pytest.mark.parametrize(("break_it", "text"), BROKEN, ids=lambda value: value if isinstance(value, str) else "")
def test_a_broken_session_is_found(break_it: Callable[[GatewayState], object], text: str) -> None:
    """Each invariant raises an error of its own when its state is broken."""
    state = with_output()
    state.validate()
    break_it(state)
    with pytest.raises(AssertionError, match=text):
        state.validate()


def test_a_forgotten_retry_is_found() -> None:
    """A request that waits for an answer has a tick that asks again."""
    state = opened(A).state
    state._placer.next_tick_s = None
    with pytest.raises(AssertionError, match="no tick will send its message again"):
        state.validate()
    state._placer.next_tick_s = 5.0
    with pytest.raises(AssertionError, match="its retry is forgotten"):
        state.validate()


def test_what_belongs_to_a_lost_owner_is_found() -> None:
    """A session without an owner keeps nothing that belonged to its last one."""
    for field, value, text in (
        ("transfer", Transfer(A, migration_id()), "has copied KV"),
        ("resend_requested_s", 1.0, "asked for tokens again"),
        ("checkpointed", Checkpointed("r", 2, B, checkpoint_id()), "has checkpoints"),
        ("hand_over", HandOver("r", 2, B, migration_id(), 9, Attained()), "does not run"),
    ):
        state = with_output()
        state.handle(PeerDown(A), 1.0)
        setattr(state.sessions["r"], field, value)
        with pytest.raises(AssertionError, match=text):
            state.validate()


def test_the_output_that_a_request_was_opened_with_stays() -> None:
    """A session's output begins with the tokens that its request came with."""
    state = opened(A).state
    session = state.sessions["r"]
    session.spec = replace(session.spec, output_token_ids=(7,))
    with pytest.raises(AssertionError, match="lost the output that it was opened with"):
        state.validate()
