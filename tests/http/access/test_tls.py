"""Serving over TLS, and a renewed certificate."""

import shutil
import ssl
import subprocess
from pathlib import Path

import httpx
import pytest

from actorserve.errors import SettingsError
from actorserve.http.access.tls import Tls
from tests.http.fakes import DEADLINE_S, app_for, says, serving

OPENSSL = shutil.which("openssl")
pytestmark = pytest.mark.skipif(OPENSSL is None, reason="openssl, which makes the certificates, is not installed")


def make_certificate(folder: Path, name: str) -> tuple[Path, Path]:
    """A self-signed certificate for localhost, and its key."""
    assert OPENSSL is not None
    certificate, key = folder / f"{name}.pem", folder / f"{name}.key"
    subprocess.run(
        [
            *(OPENSSL, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
            *("-days", "2", "-subj", f"/CN={name}", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"),
            *("-keyout", str(key), "-out", str(certificate)),
        ],
        check=True,
        capture_output=True,
    )
    key.chmod(0o600)
    return certificate, key


def client(certificate: Path | str) -> httpx.AsyncClient:
    """A client that trusts this certificate alone."""
    return httpx.AsyncClient(verify=ssl.create_default_context(cafile=certificate), timeout=DEADLINE_S)


async def test_chats_over_tls_and_a_renewed_certificate(tmp_path: Path) -> None:
    """A stream arrives over TLS; after a reload new connections get the new certificate, and open ones go on."""
    certificate, key = make_certificate(tmp_path, "first")
    first = shutil.copy(certificate, tmp_path / "copy.pem")
    tls = Tls(certificate, key)
    body = {"prompt": "x", "stream": True}
    async with serving(app_for(says("abc")), tls=tls.context) as (url, _), client(first) as old:
        address = url.replace("http:", "https:") + "/v1/completions"
        answer = await old.post(address, json=body)
        assert answer.http_version == "HTTP/1.1"
        assert answer.text.endswith("data: [DONE]\n\n")
        for renewed, current in zip(make_certificate(tmp_path, "second"), (certificate, key), strict=True):
            renewed.replace(current)
        tls.reload()
        async with client(certificate) as new:
            assert (await new.post(address, json=body)).text.endswith("data: [DONE]\n\n")
        assert (await old.post(address, json=body)).status_code == 200
        async with client(first) as third:
            with pytest.raises(httpx.ConnectError):
                await third.post(address, json=body)


async def test_plain_text_is_not_served_on_a_tls_port(tmp_path: Path) -> None:
    """A client without TLS gets no answer, and the server serves on."""
    certificate, key = make_certificate(tmp_path, "first")
    async with serving(app_for(says("a")), tls=Tls(certificate, key).context) as (url, _):
        async with httpx.AsyncClient() as plain:
            with pytest.raises(httpx.TransportError):
                await plain.get(f"{url}/health")
        async with client(certificate) as encrypted:
            assert (await encrypted.get(url.replace("http:", "https:") + "/health")).status_code == 200


def test_wrong_files_are_named_in_one_line(tmp_path: Path) -> None:
    """A missing file, a key of another certificate, no PEM, and a key that others may read are refused by name."""
    certificate, key = make_certificate(tmp_path, "first")
    _, other_key = make_certificate(tmp_path, "second")
    nothing = tmp_path / "nothing.pem"
    nothing.write_text("nothing")
    nothing.chmod(0o600)
    for files, said in (
        ((certificate, tmp_path / "absent"), "absent"),
        ((tmp_path / "absent", key), "absent"),
        ((certificate, other_key), "mismatch"),
        ((nothing, key), "nothing.pem"),
        ((certificate, nothing), "nothing.pem"),
    ):
        with pytest.raises(SettingsError, match=said) as caught:
            Tls(*files)
        assert "\n" not in str(caught.value)
    key.chmod(0o644)
    with pytest.raises(SettingsError, match="chmod 600"):
        Tls(certificate, key)


async def test_a_failed_reload_keeps_the_old_certificate(tmp_path: Path) -> None:
    """A certificate that does not fit its key is refused at the reload, and the old pair is served on."""
    certificate, key = make_certificate(tmp_path, "first")
    first = shutil.copy(certificate, tmp_path / "copy.pem")
    tls = Tls(certificate, key)
    async with serving(app_for(says("a")), tls=tls.context) as (url, _):
        shutil.copy(make_certificate(tmp_path, "second")[0], certificate)
        with pytest.raises(SettingsError, match="mismatch"):
            tls.reload()
        async with client(Path(first)) as old:
            assert (await old.get(url.replace("http:", "https:") + "/health")).status_code == 200
