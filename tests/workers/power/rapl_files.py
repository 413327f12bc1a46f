"""Energy counters of CPU packages, as files."""

from pathlib import Path


def package(folder: Path, name: str, energy_uj: int | str, range_uj: int = 1_000_000) -> None:
    """A package's counter, and where it wraps."""
    (folder / name).mkdir(exist_ok=True)
    (folder / name / "energy_uj").write_text(f"{energy_uj}\n")
    (folder / name / "max_energy_range_uj").write_text(f"{range_uj}\n")
