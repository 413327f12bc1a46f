"""Energy counters of CPU packages, as files."""

from pathlib import Path


def package(folder: Path, name: str, energy_uj: int | str, range_uj: int = 1_000_000, kind: str = "package-0") -> None:
    """A counter, where it wraps, and the name that the kernel gives to what it counts."""
    (folder / name).mkdir(exist_ok=True)
    (folder / name / "name").write_text(f"{kind}\n")
    (folder / name / "energy_uj").write_text(f"{energy_uj}\n")
    (folder / name / "max_energy_range_uj").write_text(f"{range_uj}\n")
