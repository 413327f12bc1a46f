"""``actorserve config check``: reads settings and cluster files, and starts nothing."""

import os
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Final, TextIO

from actorserve.cluster.conflicts import conflicts
from actorserve.cluster.file import DEFAULT_CLUSTER_FILE, ClusterFile, read_cluster_file
from actorserve.cluster.keys import public_keys
from actorserve.cluster.resolving import unresolvable
from actorserve.errors import NOT_TOML, SettingsError
from actorserve.logs import one_line
from actorserve.programs.keys import host_key_file
from actorserve.settings import Settings, load_settings
from actorserve.wire.curve.key_files import read_key_file
from actorserve.wire.trust import TrustError

USUAL_FILES: Final = (DEFAULT_CLUSTER_FILE.with_name("actorserve.toml"), DEFAULT_CLUSTER_FILE)
_CLUSTER_WORDS: Final = {field.alias or name for name, field in ClusterFile.model_fields.items()}


def check_files(files: Sequence[Path], out: TextIO, key_file: Path | None = None) -> bool:
    """Check each file, and settings against clusters, and write a line for each mistake to ``out``. The secret key in
    ``key_file`` has to belong to a host of each cluster; without one, the hosts' keys that lie in the usual place and
    may be read are checked.

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
                problems[file] += [*unresolvable(clusters[-1]), *_key_problems(clusters[-1], key_file)]
            else:
                settings[file] = load_settings(file)
        except SettingsError as error:
            problems[file] += error.problems
    for file, found in settings.items():
        problems[file] += [problem for cluster in clusters for problem in conflicts(found, cluster)]
    for file, lines in problems.items():
        out.writelines(f"{file}: {one_line(line)}\n" for line in lines or ["ok"])
    return not any(problems.values())


def _key_problems(cluster: ClusterFile, key_file: Path | None) -> list[str]:
    try:
        keys = public_keys(cluster)
    except SettingsError as error:
        return list(error.problems)
    if keys is None:
        return [] if key_file is None else [f"there is the key file {key_file}, and the hosts have no public_key"]
    if key_file is not None:
        pairs = {key_file: list(keys.hosts)}
    else:
        usual = {host_key_file(name): [name] for name in keys.hosts}
        pairs = {file: hosts for file, hosts in usual.items() if os.access(file, os.R_OK)}
    problems = []
    for file, hosts in pairs.items():
        try:
            own = read_key_file(file)
        except TrustError as error:
            problems.append(str(error))
            continue
        if own.public_key not in [keys.hosts[name].public_key for name in hosts]:
            belongs_to = keys.holders().get(own.public_key, "no host of the cluster")
            problems.append(f"the secret key in {file} belongs to {belongs_to}: its public key is {own.public_key}")
    return problems


def _is_cluster_file(file: Path) -> bool:
    """Whether a file has names at the top that only a cluster's file has. A file that is no TOML has none."""
    try:
        return bool(_CLUSTER_WORDS & tomllib.loads(file.read_text(encoding="utf-8")).keys())
    except (OSError, *NOT_TOML):
        return False
