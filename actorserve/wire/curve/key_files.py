"""Files of secret keys: one key pair a file, which only its owner may read."""

import os
import stat
import tomllib
from pathlib import Path
from typing import Final

import zmq

from actorserve.errors import NOT_TOML
from actorserve.wire.trust import Holder, KeyPair, TrustError, check_key

_MODE: Final = 0o600
_FOLDER_MODE: Final = 0o700
_OTHERS: Final = 0o077
_MAX_BYTES: Final = 4096


def make_key_pair() -> KeyPair:
    """A fresh key pair, from the kernel's random numbers."""
    public_key, secret_key = zmq.curve_keypair()
    return KeyPair(public_key.decode(), secret_key.decode())


def write_key_file(file: Path, pair: KeyPair, holder: Holder) -> None:
    """Write a new file that only this user may read, with the folders that it lies in.

    Raises: TrustError if the file exists already, or cannot be written.
    """
    text = (
        f"# The secret key of {holder}. Keep it where only {holder} reads it, and copy it nowhere else.\n"
        f'# Its public key: {pair.public_key}\nsecret_key = "{pair.secret_key}"\n'
    )
    try:
        file.parent.mkdir(mode=_FOLDER_MODE, parents=True, exist_ok=True)
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, _MODE)
    except FileExistsError:
        raise TrustError(f"{file} exists already, and a key is never overwritten; remove it, or choose --out") from None
    except OSError as error:
        raise TrustError(f"cannot write the key file {file}: {error.strerror}") from None
    with os.fdopen(descriptor, "w", encoding="ascii") as opened:
        os.fchmod(descriptor, _MODE)  # a umask may have taken our own rights away
        opened.write(text)


def read_key_file(file: Path) -> KeyPair:
    """The key pair in a file. Raises: TrustError, which repeats no key, if it cannot be read, others may read it, or it
    is a symbolic link or no key file.
    """
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        why = "it is a symbolic link" if file.is_symlink() else error.strerror
        raise TrustError(f"cannot read the key file {file}: {why}") from None
    with os.fdopen(descriptor, "rb") as opened:
        facts = os.fstat(descriptor)
        if not stat.S_ISREG(facts.st_mode):
            raise TrustError(f"the key file {file} is not a plain file")
        if facts.st_uid not in (0, os.geteuid()):
            raise TrustError(f"the key file {file} belongs to another user")
        if facts.st_mode & _OTHERS:
            raise TrustError(
                f"others may read or write the key file {file}: make a new key, or chmod 600 it if no other user has "
                "read it"
            )
        content = opened.read(_MAX_BYTES)
    try:
        secret_key = tomllib.loads(content.decode("ascii"))["secret_key"]
        check_key(secret_key, "secret_key")
    except (*NOT_TOML, KeyError, TypeError, TrustError):
        raise TrustError(f"{file} is not a key file: `actorserve keys` makes one") from None
    return KeyPair(zmq.curve_public(secret_key.encode()).decode(), secret_key)
