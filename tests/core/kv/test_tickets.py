"""Tickets: each is good for exactly what it names."""

from dataclasses import replace

import pytest

from actorserve.core.kv.tickets import is_genuine, make_ticket
from actorserve.core.messages import TransferId, TransferKind

KEY = b"key"
MIGRATION = TransferId(TransferKind.MIGRATION, 7)
CHECKPOINT = TransferId(TransferKind.CHECKPOINT, 7)
TICKET = make_ticket(KEY, MIGRATION, 1, (4, 5), on_host=False)


@pytest.mark.parametrize(
    "changes",
    [
        {"transfer": CHECKPOINT},
        {"transfer": TransferId(TransferKind.MIGRATION, 8)},
        {"stage": 2},
        {"on_host": True},
        {"blocks": (4, 6)},
        {"secret": "é"},
    ],
    ids=["kind", "number", "stage", "pool", "blocks", "secret"],
)
def test_a_changed_ticket_is_not_genuine(changes: dict[str, object]) -> None:
    """A ticket of a migration allows nothing to a checkpoint of the same number, nor another stage, pool or block."""
    assert is_genuine(KEY, TICKET)
    assert not is_genuine(b"other", TICKET)
    assert not is_genuine(KEY, replace(TICKET, **changes))  # type: ignore[arg-type]


def test_a_ticket_needs_a_key() -> None:
    """Without a key anyone could forge tickets."""
    with pytest.raises(ValueError, match="needs a key"):
        make_ticket(b"", MIGRATION, 0, (1,), on_host=False)
