"""The iterations of a worker, from its journal."""

from pathlib import Path

import pytest

from actorserve.core.gateway.config import GatewayConfig
from actorserve.errors import ProtocolError
from actorserve.wire.journal import write_recipe
from actorserve.wire.recipes import recipe_text
from tests.core.harness.profiles import PROFILE
from tests.tools.journals.journals import write_journal
from tools.journals.steps import Kind, Recording, Work, read_recording, work_of


def test_a_journal_tells_what_its_worker_computed_and_when(tmp_path: Path) -> None:
    """Each iteration has its work, its duration and its pause; the worker's profile comes from the journal, too."""
    file = tmp_path / "worker-0-1.journal"
    plans = write_journal(file, PROFILE, [100, 20], 5, lambda work: (0.001 * work.num_rows, 0.25))
    recording = read_recording(file)
    steps = recording.steps
    assert recording.profile == PROFILE
    assert [step.work for step in steps] == [work_of(plan) for plan in plans]
    assert {step.work.kind for step in steps} == {Kind.PREFILL, Kind.BEHIND, Kind.DECODE}
    assert sum(tokens for step in steps for tokens, _ in step.work.chunks) == 120
    for step in steps:
        assert step.duration_s == 0.25
        assert not step.was_ahead
        assert step.pause_s == pytest.approx(0.001 * step.work.num_rows)


def test_an_iterations_kind_follows_from_its_rows() -> None:
    """A chunk behind context is a kind of its own, with or without decodes."""
    kinds = [
        Work((), 3, 60).kind,
        Work(((8, 0), (9, 0)), 0, 0).kind,
        Work(((8, 0),), 1, 20).kind,
        Work(((8, 0), (8, 16)), 0, 0).kind,
        Work(((8, 16),), 1, 20).kind,
    ]
    assert kinds == [Kind.DECODE, Kind.PREFILL, Kind.MIXED, Kind.BEHIND, Kind.BEHIND]


def test_another_file_is_refused(tmp_path: Path) -> None:
    """A gateway's journal is no worker's, and a journal whose effects differ is of another version."""
    file = tmp_path / "gateway-0-1.journal"
    with file.open("wb") as opened:
        write_recipe(opened, recipe_text(GatewayConfig(1.0, 30.0, 600.0)))
    with pytest.raises(ProtocolError, match="not the journal of a worker"):
        read_recording(file)
    other = tmp_path / "worker-0-1.journal"
    write_journal(other, PROFILE, [20], 3, lambda work: (0.0, 0.25))
    data = other.read_bytes()
    other.write_bytes(data.replace(b'"max_batch_tokens": 64', b'"max_batch_tokens": 17'))
    with pytest.raises(ProtocolError, match="is of another version of the worker: input 2, Start"):
        read_recording(other)


def test_swaps_have_the_level_of_the_recorded_ones() -> None:
    """The link has the median ratio of recorded and predicted times; without a swap it is the profile's."""
    link = PROFILE.swap
    swaps = [(size, factor * link.copy_s(size)) for size in (1000, 9000) for factor in (2.0, 3.0, 90.0)]
    slower = Recording(PROFILE, [], swaps).swap_link()
    assert slower.copy_s(5000) == pytest.approx(3.0 * link.copy_s(5000))
    assert Recording(PROFILE, []).swap_link() == link
