"""``actorserve config check``: reads settings and cluster files, and starts nothing."""

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Final, TextIO

from actorserve.cluster.file import DEFAULT_CLUSTER_FILE, ClusterFile, read_cluster_file
from actorserve.cluster.resolving import unresolvable
from actorserve.errors import SettingsError
from actorserve.settings import load_settings

USUAL_FILES: Final = (DEFAULT_CLUSTER_FILE.with_name("actorserve.toml"), DEFAULT_CLUSTER_FILE)
_CLUSTER_WORDS: Final = {field.alias or name for name, field in ClusterFile.model_fields.items()}


def check_files(files: Sequence[Path], out: TextIO) -> bool:
    """Check each file, and write a line for each mistake to ``out``. Returns whether all files are right."""
    are_right = True
    for file in files:
        problems = _problems(file)
        are_right &= not problems
        out.writelines(f"{file}: {' '.join(problem.split())}\n" for problem in problems or ["ok"])
    return are_right


def _problems(file: Path) -> Sequence[str]:
    try:
        if _is_cluster_file(file):
            return unresolvable(read_cluster_file(file))
        load_settings(file)
    except SettingsError as error:
        return error.problems
    return ()


def _is_cluster_file(file: Path) -> bool:
    """Whether a file has names at the top that only a cluster's file has. A file that is no TOML has none."""
    try:
        return bool(_CLUSTER_WORDS & tomllib.loads(file.read_text(encoding="utf-8")).keys())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError):
        return False
