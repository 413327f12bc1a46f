"""A message about a transfer reaches the side that its kind names, and no other."""

from dataclasses import replace

from actorserve.core.messages import Checkpoint, CheckpointConfirmed, Copied, Declined, DeclineReason, Withdrawn
from tests.core.harness.destination import WHOLE, S, destination, ticket as offered, with_copy
from tests.core.harness.driver import GATEWAY, checkpoint_id, migration_id
from tests.core.harness.source import D, at, told


def test_a_checkpoints_answer_does_not_move_a_migration_of_the_same_number() -> None:
    """The source of migration 1 ignores messages about checkpoint 1, and tells the sender that it has none."""
    instance = at("copying")
    assert told(instance.handle(Copied(checkpoint_id(), 0), 0.0, D), D) == [Withdrawn(checkpoint_id())]
    assert instance.handle(Declined(checkpoint_id(), DeclineReason.NO_BLOCKS), 0.0, D) == []
    assert instance.state.num_stale_messages == 2
    assert len(instance.state.migration_source) == 1
    assert instance.handle(Copied(migration_id(), 0), 0.0, D) == []
    assert instance.state.num_stale_messages == 2


def test_withdrawing_a_checkpoint_keeps_a_migration_of_the_same_number() -> None:
    """The destination drops what was copied for migration 1 only when that is withdrawn."""
    instance = with_copy()
    instance.handle(Withdrawn(checkpoint_id()), 0.0, S)
    assert len(instance.state.migration_destination) == 1
    instance.handle(Withdrawn(migration_id()), 0.0, S)
    assert not instance.state.migration_destination


def test_a_message_of_the_wrong_kind_is_counted_and_dropped() -> None:
    """No migration begins under a checkpoint's id, and no checkpoint under a migration's."""
    instance = destination(num_host_blocks=8)
    wrong = replace(WHOLE, ticket=replace(WHOLE.ticket, transfer=checkpoint_id()))
    assert instance.handle(wrong, 0.0, S) == []
    assert instance.handle(Checkpoint("r", GATEWAY, 0, (1, 2, 3, 4), offered(0, 40)), 0.0, S) == []
    assert instance.handle(CheckpointConfirmed(migration_id(), 0), 0.0, S) == []
    assert instance.state.num_stale_messages == 3
    assert not instance.state.migration_destination
    assert not instance.state.checkpoint_store


def test_a_migration_and_a_checkpoint_of_one_number_live_side_by_side() -> None:
    """Each transfer is copied and answered under its own id."""
    instance = with_copy(num_host_blocks=8)
    copy = replace(offered(0, 40), transfer=checkpoint_id())
    instance.handle(Checkpoint("q", GATEWAY, 0, (1, 2, 3, 4), copy), 0.0, S)
    assert (len(instance.state.migration_destination), len(instance.state.checkpoint_store)) == (1, 1)
