"""TLS: the certificate that the server shows, and its renewal while the server runs."""

import os
import ssl
from pathlib import Path

from actorserve.errors import SettingsError
from actorserve.local_trust import open_plain


class Tls:
    """The server's side of TLS 1.2 and 1.3, with HTTP/1.1.

    Raises: SettingsError, in one line, for files that cannot be read, that do not belong together, or that hold a
    private key which others may read.
    """

    def __init__(self, certificate_file: Path, key_file: Path) -> None:
        self._certificate_file = certificate_file
        self._key_file = key_file
        self.context = _context(certificate_file, key_file)

    def reload(self) -> None:
        """Show the files' new certificate on new connections. Raises: as the constructor; then the old one is kept."""
        _context(self._certificate_file, self._key_file)  # so that a mismatch leaves the context in use as it was
        self.context.load_cert_chain(self._certificate_file, self._key_file)


def read_tls(certificate_file: Path | None, key_file: Path | None) -> Tls | None:
    """None without the two files. Raises: SettingsError, as ``Tls``."""
    return None if certificate_file is None or key_file is None else Tls(certificate_file, key_file)


def _context(certificate_file: Path, key_file: Path) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    try:
        with open_plain(certificate_file), open_plain(key_file) as opened:
            facts = os.fstat(opened.fileno())
            if facts.st_uid not in (0, os.geteuid()) or facts.st_mode & 0o037:
                raise SettingsError(f"others may read or write the private key in {key_file}; chmod 600 it")
        # A file whose key is encrypted must not ask for its password on the terminal.
        context.load_cert_chain(certificate_file, key_file, password=lambda: b"")
    except ssl.SSLError as error:
        reason = (error.reason or "no certificate and key in PEM form").lower().replace("_", " ")
        raise SettingsError(f"cannot use the certificate {certificate_file} and the key {key_file}: {reason}") from None
    except OSError as error:
        raise SettingsError(f"cannot read {error.filename or certificate_file}: {error.strerror}") from None
    return context
