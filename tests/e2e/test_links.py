"""Two hosts in two network namespaces, over a link of 5 ms and 1 % loss, which becomes slow, is cut, and heals."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.server import ROOT

DEADLINE_S = 500.0
NAMESPACES = ("unshare", "--user", "--map-root-user", "--net")


def why_not() -> str:
    """Why there cannot be such hosts here; empty if there can."""
    if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        return "there is no /dev/net/tun here"
    try:
        words = (*NAMESPACES, "ip", "tuntap", "add", "mode", "tun", "link")
        done = subprocess.run(words, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return "there is no unshare here"
    return "" if done.returncode == 0 else f"this machine allows no network namespaces: {done.stderr.strip()}"


pytestmark = [pytest.mark.e2e, pytest.mark.model, pytest.mark.skipif(bool(why_not()), reason=why_not())]


def test_a_bad_link_costs_no_token(tmp_path: Path, default_model_path: Path) -> None:
    """Every token comes once and is the same while requests move over the link, a host is drained over it, the link is
    slow, and it is cut for longer than hosts wait for each other.
    """
    command = [*NAMESPACES, sys.executable, "-P", "-m", "tests.e2e.two_networks", str(tmp_path)]
    done = subprocess.run(
        [*command, str(default_model_path)],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert done.returncode == 0, done.stderr
