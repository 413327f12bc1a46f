"""``actorserve keys``: makes a key pair, keeps the secret in a file, and prints the line for the cluster's file."""

import os
from pathlib import Path
from typing import Final, TextIO

from actorserve.cluster.file import DEFAULT_CLUSTER_FILE
from actorserve.wire.curve.key_files import make_key_pair, write_key_file
from actorserve.wire.trust import Holder, HolderKind, check_name

_HOST_KEYS: Final = DEFAULT_CLUSTER_FILE.with_name("keys")

HOLDERS: Final = {
    HolderKind.HOST.value: "a host, whose processes share the key",
    HolderKind.OPERATOR.value: "a person who acts with `actorserve console`",
    HolderKind.VIEWER.value: "a person or a program that only looks",
    HolderKind.ACTUATOR.value: "the process that sets power caps on the host of this name",
}
"""What has a key pair, with a text for people."""


def host_key_file(host: str) -> Path:
    """Where a host's secret key lies, unless another file is named."""
    return _HOST_KEYS / f"{host}.key"


def make_keys(kind: str, name: str, out_file: Path | None, out: TextIO) -> None:
    """Make a key pair of the ``kind`` of holder, in ``out_file`` or the usual place, and write to ``out`` what to do
    with it.

    Raises: TrustError for a name that cannot be one, and for a file that exists or cannot be written.
    """
    holder = Holder(HolderKind(kind), name)
    check_name(name)
    file = out_file or _usual_file(holder)
    pair = make_key_pair()
    write_key_file(file, pair, holder)
    place, line = _line(holder, pair.public_key)
    out.write(f"# The secret key of {holder} is in {file}. In the cluster's file, on every host, {place}:\n{line}\n")


def _usual_file(holder: Holder) -> Path:
    match holder.kind:
        case HolderKind.HOST:
            return host_key_file(holder.name)
        case HolderKind.ACTUATOR:
            return _HOST_KEYS / f"{holder.name}.actuator"
        case _:
            settings = os.environ.get("XDG_CONFIG_HOME", "")
            folder = Path(settings) if settings.startswith("/") else Path.home() / ".config"
            return folder / "actorserve" / f"{holder.name}.key"


def _line(holder: Holder, public_key: str) -> tuple[str, str]:
    match holder.kind:
        case HolderKind.HOST:
            return f"in the table of host {holder.name}", f'public_key = "{public_key}"'
        case HolderKind.ACTUATOR:
            return f"in the table of host {holder.name}", f'actuator_key = "{public_key}"'
        case kind:
            name = holder.name if "." not in holder.name else f'"{holder.name}"'
            return f"below [{kind.value}s]", f'{name} = "{public_key}"'
