"""tools/profile --from-journal: a profile fitted to what a worker ran."""

import random
from dataclasses import replace
from math import inf
from pathlib import Path

import pytest

from actorserve.core.timing.profile import Curve, Profile
from actorserve.profile_files import load_profile
from tests.core.harness.profiles import PROFILE
from tests.tools.journals.journals import write_journal
from tools.journals.steps import Kind, RecordedStep, Recording, Work
from tools.profiling import __main__ as command
from tools.profiling.calibrate import calibrated, fit_pauses

BASE = replace(
    PROFILE,
    prefill=Curve((1.0, 64.0, 512.0), (0.01, 0.04, 0.4)),
    prefill_context_s=1e-7,
    weights_s=0.005,
    decode=Curve((1.0, 16.0), (0.01, 0.02)),
    decode_context=Curve((0.0, 8000.0), (0.0, 0.02)),
    decode_mixed_s=1e-4,
)
TRUE = replace(
    BASE,
    prefill=Curve((1.0, 64.0, 512.0), (0.02, 0.08, 0.8)),
    prefill_context_s=2e-7,
    weights_s=0.01,
    decode=Curve((1.0, 16.0), (0.015, 0.03)),
    decode_context=Curve((0.0, 8000.0), (0.0, 0.012)),
    decode_mixed_s=2e-4,
)


def steps_of(profile: Profile, works: list[Work], rng: random.Random) -> list[RecordedStep]:
    """Iterations that take the profile's times, with noise, and each tenth four times as long."""
    steps = []
    for number, work in enumerate(works):
        seconds = work.predicted_s(profile) * rng.gauss(1.0, 0.03) * (4.0 if number % 10 == 0 else 1.0)
        pause_s = 0.001 + 5e-5 * work.num_rows
        steps.append(RecordedStep(10.0, 9.0, 10.0 + pause_s + seconds, seconds, work))
    return steps


def test_a_calibrated_profile_predicts_the_run() -> None:
    """Decodes, their context and prefills have found their own factors, in spite of noise and outliers."""
    rng = random.Random(0)
    works = [Work((), number, number * rng.randrange(20, 500)) for number in range(1, 17) for _ in range(20)]
    works += [Work(((rng.randrange(8, 200), 0),), rng.randrange(8), 600) for _ in range(100)]
    works += [Work(((rng.randrange(8, 100), 64),), rng.randrange(8), 600) for _ in range(50)]
    works = [work if work.num_decodes else replace(work, num_context_tokens=0) for work in works]
    found = calibrated(Recording(BASE, steps_of(TRUE, works, rng)))
    for work in works:
        assert work.predicted_s(found) == pytest.approx(work.predicted_s(TRUE), rel=0.08)
    assert found.decode(16) == pytest.approx(TRUE.decode(16), rel=0.05)
    assert found.decode_context(4000) == pytest.approx(TRUE.decode_context(4000), rel=0.15)
    assert found.pause_s == pytest.approx(0.001, rel=0.05)
    assert found.pause_row_s == pytest.approx(5e-5, rel=0.05)
    assert 0.0 < dict(found.errors)["calibrated_median"] < 0.05


def test_a_kind_that_hardly_ran_keeps_its_costs() -> None:
    """A few prefills tell nothing, so they stay as they were measured."""
    rng = random.Random(0)
    works = [Work((), number % 8 + 1, 600) for number in range(100)] + [Work(((50, 0),), 0, 0)] * 5
    found = calibrated(Recording(BASE, steps_of(TRUE, works, rng)))
    assert found.prefill == BASE.prefill
    assert found.decode != BASE.decode
    assert calibrated(Recording(BASE, [])) == BASE


def test_pauses_are_those_of_iterations_that_were_not_planned_ahead() -> None:
    """An iteration that was planned ahead does not wait, and one number of rows tells no slope."""
    work = Work((), 4, 100)
    waited = RecordedStep(2.0, 1.0, 3.002, 1.0, work)
    ahead = RecordedStep(0.5, 1.0, 2.0001, 1.0, replace(work, num_decodes=9))
    assert fit_pauses([waited] * 20 + [ahead]) == pytest.approx((0.002, 0.0))
    assert fit_pauses([ahead] * 20) == (0.0, 0.0)


def test_pauses_of_too_few_iterations_tell_nothing() -> None:
    """The first iteration, on a cold engine, does not count, and a handful of others leave the known pauses."""
    work = Work((), 4, 100)
    first = RecordedStep(0.0, -inf, 0.9, 0.01, work)
    waited = RecordedStep(2.0, 1.0, 3.002, 1.0, work)
    known = 0.0013, 1e-5
    assert fit_pauses([first, *[waited] * 10], known) == known
    assert fit_pauses([first, *[waited] * 20], known) == pytest.approx((0.002, 0.0))


def test_costs_that_changed_have_errors_of_their_own() -> None:
    """The errors of the fit before are gone, its drift stays, and an iteration without a duration does not count."""
    steps = steps_of(TRUE, [Work((), 4, 600)] * 40, random.Random(0))
    base = replace(BASE, errors=(("drift", 0.2), ("mixed_median", 0.01)))
    found = calibrated(Recording(base, [*steps, replace(steps[0], duration_s=0.0)]))
    assert set(dict(found.errors)) == {"calibrated_median", "drift"}


def test_a_journal_gives_a_profile(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command reads the worker's profile and iterations, shows how far off it was, and writes the new profile."""
    journal, file = tmp_path / "worker-0-1.journal", tmp_path / "fitted.toml"
    write_journal(journal, BASE, [40] * 30, 20, lambda work: (0.001, work.predicted_s(TRUE)))
    assert command.main(["--from-journal", str(journal), "--output", str(file)]) == 0
    fitted = load_profile(file)
    assert fitted.prefill_s(40) == pytest.approx(TRUE.prefill_s(40), rel=0.05)
    assert fitted.decode_s(16, 900) == pytest.approx(TRUE.decode_s(16, 900), rel=0.05)
    assert fitted.pause_s == pytest.approx(0.001)
    shown = capsys.readouterr().out
    assert Kind.DECODE.value in shown
    assert "written to" in shown


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--output", "fitted.toml"), "No such file"),
        ((), "--output is missing: expected a file"),
    ],
)
def test_mistakes_are_one_line(
    tmp_path: Path,
    arguments: tuple[str, ...],
    says: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A missing journal or output is an error without a traceback."""
    monkeypatch.chdir(tmp_path)
    assert command.main(["--from-journal", "none.journal", *arguments]) == command.EXIT_UNUSABLE
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1


def test_a_journal_with_few_iterations_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A profile is not fitted to next to nothing."""
    journal = tmp_path / "worker-0-1.journal"
    write_journal(journal, BASE, [40], 3, lambda work: (0.001, 0.1))
    arguments = ["--from-journal", str(journal), "--output", str(tmp_path / "x.toml")]
    assert command.main(arguments) == command.EXIT_UNUSABLE
    assert "has 3 iterations: expected 20 or more" in capsys.readouterr().err
