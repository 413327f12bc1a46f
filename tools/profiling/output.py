"""Checks that a tool can write its file, before it works for minutes."""

import errno
import tempfile
from pathlib import Path


def prepare_file(file: Path) -> None:
    """Make the file's folder, and check that a file can be written there. Raises: OSError, which names a path."""
    if file.is_dir():
        raise IsADirectoryError(errno.EISDIR, "Is a directory", str(file))
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=file.parent, prefix="partial-"):
            pass
    except FileExistsError:
        raise NotADirectoryError(errno.ENOTDIR, "Not a directory", str(file)) from None
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(file)) from None
