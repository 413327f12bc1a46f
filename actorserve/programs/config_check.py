"""``actorserve config check``: reads settings and cluster files, and starts nothing."""

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Final, TextIO

from actorserve.cluster.conflicts import conflicts
from actorserve.cluster.file import DEFAULT_CLUSTER_FILE, ClusterFile, read_cluster_file
from actorserve.cluster.resolving import unresolvable
from actorserve.errors import SettingsError
from actorserve.settings import Settings, load_settings

USUAL_FILES: Final = (DEFAULT_CLUSTER_FILE.with_name("actorserve.toml"), DEFAULT_CLUSTER_FILE)
_CLUSTER_WORDS: Final = {field.alias or name for name, field in ClusterFile.model_fields.items()}


def check_files(files: Sequence[Path], out: TextIO) -> bool:
    """Check each file, and settings against clusters, and write a line for each mistake to ``out``.

    Returns whether all files are right.
    """
    problems: dict[Path, list[str]] = {}
    settings: dict[Path, Settings] = {}
    clusters: list[ClusterFile] = []
    for file in files:
        problems[file] = []
        try:
            if _is_cluster_file(file):
                clusters.append(read_cluster_file(file))
                problems[file] += unresolvable(clusters[-1])
            else:
                settings[file] = load_settings(file)
        except SettingsError as error:
            problems[file] += error.problems
    for file, found in settings.items():
        problems[file] += [problem for cluster in clusters for problem in conflicts(found, cluster)]
    for file, lines in problems.items():
        out.writelines(f"{file}: {' '.join(line.split())}\n" for line in lines or ["ok"])
    return not any(problems.values())


def _is_cluster_file(file: Path) -> bool:
    """Whether a file has names at the top that only a cluster's file has. A file that is no TOML has none."""
    try:
        return bool(_CLUSTER_WORDS & tomllib.loads(file.read_text(encoding="utf-8")).keys())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError):
        return False
