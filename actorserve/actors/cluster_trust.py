"""A process's trust in a cluster of several hosts: its host's key pair, and the keys in the cluster's file.

A process reads the keys from the cluster's file itself, and reads them again when it reloads (``processes.reload``).
All else it has from the copy in the runtime folder, which stays as it was when the host was started. The last file
whose keys were good is kept in the runtime folder as well. A process that starts again while the cluster's file is half
written takes the keys from there, so that no key comes back that was removed.
"""

import logging
import os
from pathlib import Path
from typing import Final

from actorserve.cluster.file import parse_cluster, read_cluster_text
from actorserve.cluster.keys import check_own_key, public_keys
from actorserve.core.messages import Role
from actorserve.errors import SettingsError
from actorserve.processes.child import Child
from actorserve.processes.runtime_folder import LAST_KEYS
from actorserve.wire.curve.key_files import read_key_file
from actorserve.wire.trust import KeyPair, PublicKeys, Trust

_log: Final = logging.getLogger("actorserve.keys")


def open_trust(child: Child) -> Trust | None:
    """The trust of this process, which follows the cluster's file when the process reloads; None without keys.

    Raises: SettingsError, if the keys in the cluster's file are wrong, or ours is not among them; TrustError, if our
    key file cannot be used.
    """
    if child.cluster_file is None or child.key_file is None:
        return None
    files = _KeyFiles(child, read_key_file(child.key_file))
    trust = Trust(files.own, files.first())
    child.reloads.add("keys of the cluster", lambda: trust.replace(files.read()))
    return trust


class _KeyFiles:
    """The cluster's file, the copy that was made when the host was started, and the last good one."""

    def __init__(self, child: Child, own: KeyPair) -> None:
        assert child.cluster_file is not None
        self.own = own
        self._host = child.host
        self._is_actuator = child.file_name == Role.POWER.value
        self._copy = child.cluster_file
        self._source = child.cluster_source or child.cluster_file
        self._last = child.runtime_dir / LAST_KEYS
        self._id = parse_cluster(read_cluster_text(self._copy), self._copy).id

    def first(self) -> PublicKeys:
        """The keys with which the process starts."""
        try:
            return self.read()
        except SettingsError as error:
            last = self._last if self._last.exists() else self._copy
            keys = self._keys(read_cluster_text(last), last)
            _log.warning("the keys are those of the last good file, because of this one: %s", error)
            return keys

    def read(self) -> PublicKeys:
        """The keys that the cluster's file has now. Raises: SettingsError if they are wrong."""
        text = read_cluster_text(self._source)
        keys = self._keys(text, self._source)
        self._keep(text)
        return keys

    def _keys(self, text: str, file: Path) -> PublicKeys:
        cluster = parse_cluster(text, file)
        if cluster.id != self._id:
            raise SettingsError(f"{file}: the cluster's id is {cluster.id!r}, and this process belongs to {self._id!r}")
        try:
            keys = public_keys(cluster)
            if keys is None:
                raise SettingsError("there are no keys any more")
            check_own_key(self.own, keys, self._host, is_actuator=self._is_actuator)
        except SettingsError as error:
            raise SettingsError(f"{file}: {error}") from None
        return keys

    def _keep(self, text: str) -> None:
        """All processes of the host do this, so a reader must never find a part of a file."""
        unfinished = self._last.with_name(f"{LAST_KEYS}.{os.getpid()}")
        try:
            unfinished.write_text(text, encoding="utf-8")
            unfinished.replace(self._last)
        except OSError as error:
            _log.warning("the keys cannot be kept in %s: %s", self._last, error.strerror)
