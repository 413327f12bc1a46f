"""Tests that need a GPU are known, so that ``-m gpu`` runs all of them on a machine that has one."""

from tests.sources import ROOT

_NEEDS_GPU = "skipif(not torch.cuda.is_available()", "or not torch.cuda.is_available()"


def test_every_test_that_needs_a_gpu_is_marked() -> None:
    """A file whose tests are skipped without a GPU marks tests with ``gpu``."""
    skipping = [
        file
        for file in sorted((ROOT / "tests").rglob("test_*.py"))
        if any(text in file.read_text(encoding="utf-8") for text in _NEEDS_GPU) and file.name != "test_gpu_tests.py"
    ]
    assert skipping
    for file in skipping:
        assert "pytest.mark.gpu" in file.read_text(encoding="utf-8"), file
