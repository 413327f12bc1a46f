"""tools/bench mutants: every mutant fits to the source, and histories of faults tell a bug from a harmless change."""

from pathlib import Path

import pytest

from tests.tools.benchmarks.run_bench import ROOT, run_bench
from tools.benchmarks.mutants.catalogue import MUTANTS
from tools.benchmarks.mutants.mutant import Mutant, MutantError
from tools.benchmarks.mutants.mutants import examine

CORE = ROOT / "actorserve" / "core"


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_fits_to_the_source(mutant: Mutant) -> None:
    """The text that a mutant changes stands once in its file, and what it makes of the file is Python."""
    compile(mutant.mutate((CORE / mutant.path).read_text(encoding="utf-8")), mutant.path, "exec")


def test_mutants_have_different_names() -> None:
    """A mutant is named by what is wrong, so no two have the same name."""
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)


def test_a_mutant_whose_source_has_moved_is_an_error(tmp_path: Path) -> None:
    """A mutant that does not fit any more is no survivor: the error names the mutant, the text and the file."""
    (tmp_path / "file.py").write_text("a = 1\n")
    with pytest.raises(MutantError, match=r"mutant 'gone': expected 'b = 1' once in file\.py, found it 0 times"):
        Mutant("gone", "file.py", "b = 1", "b = 2").apply(tmp_path)
    with pytest.raises(MutantError, match=r"mutant 'gone': there is no file other\.py"):
        Mutant("gone", "other.py", "b = 1", "b = 2").apply(tmp_path)


def test_histories_find_a_bug() -> None:
    """A copy of the core with a bug fails, with the history and what was wrong; one without a bug passes."""
    path, text = "gateway/owner_messages.py", "session.output += token_ids"
    found = examine(Mutant("a token is lost", path, text, f"{text}[1:]"), 0, 2).found
    assert found.startswith("history 0: AssertionError"), found
    assert examine(Mutant("a copy is taken", path, text, f"{text}[:]"), 0, 2).found == ""


def test_an_unknown_name_is_an_error() -> None:
    """A name that no mutant has is told, and nothing runs."""
    done = run_bench("mutants", "no such bug")
    assert done.returncode == 2
    assert "bench: no mutant's name has any of these texts: no such bug" in done.stderr
