"""tools/install lays a host's share out below a temporary root, and takes it away; systemd-analyze reads its units."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from configparser import RawConfigParser
from pathlib import Path

import pytest

from actorserve.settings import load_settings

ROOT = Path(__file__).resolve().parents[2]
UNITS = "usr/local/lib/systemd/system"
CLUSTER = """
id = "lab"
coordinators = ["alpha"]
[[host]]
name = "alpha"
address = "10.0.0.1"
public_key = "@Fn=zZH?(x<EjT>:@$wOd%RDbNg@Z<!??M[(SH!h"
gateways = 1
workers = 3
[[host]]
name = "beta"
address = "10.0.0.2"
public_key = "bEHPp&zx7*Ap{Bfy=k7%NEtOnOMQ{V11QC<N&fdW"
workers = 1
"""
SERVICES = ("actorserve.service", "actorserve-prepare.service", "actorserve-worker@0.service")
SERVICES_WITHOUT_GPU = ("actorserve-coordinator.service", "actorserve-gateway@0.service")
POWER = "actorserve-power.service"
MAX_EXPOSURE = 2.2  # of 10; a service without any protection has 9.6
MAX_EXPOSURE_OF_ROOT = 3.4  # of the one that runs as root
GRACE_S = 20.0  # for a process whose requests have ended
STUBS = ("sysinit.target", "basic.target", "shutdown.target", "network-online.target", "multi-user.target")

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give files to the system user")
needs_analyze = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd-analyze here")
needs_unshare = pytest.mark.skipif(
    subprocess.run(["unshare", "--user", "--map-root-user", "--mount", "true"], check=False).returncode != 0,
    reason="this machine allows no new namespaces",
)


def run(*arguments: object, inside: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """``tools/install`` with this Python's environment; ``inside``: a command that runs it."""
    command = [*inside, sys.executable, "-P", "-m", "tools.installing", *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=False)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A root into which a host's share was installed."""
    root = tmp_path / "root"
    done = run("--root", root, "--venv", sys.prefix)
    assert (done.returncode, done.stderr) == (0, "")
    return root


def files(root: Path) -> dict[str, str]:
    """The text of each of our files below ``root``."""
    found = {}
    for path in sorted(root.rglob("*actorserve*")) + sorted((root / "etc/actorserve").rglob("*")):
        if path.is_file():
            found[str(path.relative_to(root))] = path.read_text()
    return found


def test_a_dry_run_prints_the_steps_and_does_none(tmp_path: Path) -> None:
    """Without root, too, --dry-run says what an installation would do, and changes nothing."""
    done = run("--root", tmp_path, "--venv", sys.prefix, "--dry-run")
    assert done.returncode == 0
    assert f"would write {tmp_path / 'usr/local/bin/actorserve'}" in done.stdout
    assert all(line.startswith("would ") for line in done.stdout.splitlines())
    assert list(tmp_path.iterdir()) == []


def test_an_installed_program_runs(root: Path) -> None:
    """The program that the units start is the one of the chosen environment, and its settings are valid."""
    done = subprocess.run([root / "usr/local/bin/actorserve", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("actorserve ")
    assert load_settings(root / "etc/actorserve/actorserve.toml").http.lame_duck_s == 5.0
    assert tomllib.loads((root / "etc/actorserve/all-settings.toml").read_text()) != {}


@as_root
def test_the_system_user_owns_what_only_it_may_read(root: Path) -> None:
    """The keys' folder is the system user's alone, and only the settings' group may read them."""
    line = next(line for line in (root / "etc/passwd").read_text().splitlines() if line.startswith("actorserve:"))
    uid, gid = map(int, line.split(":")[2:4])
    keys, settings = (root / "etc/actorserve/keys").stat(), (root / "etc/actorserve/actorserve.toml").stat()
    assert (keys.st_uid, keys.st_mode & 0o777) == (uid, 0o700)
    assert (settings.st_uid, settings.st_gid, settings.st_mode & 0o777) == (0, gid, 0o640)


def test_a_second_installation_keeps_settings_and_repairs_the_rest(root: Path) -> None:
    """An installation that is complete does nothing; a unit that was changed is written again, and settings stay."""
    again = run("--root", root, "--venv", sys.prefix)
    assert again.stdout == "nothing to do\n"
    before = files(root)
    settings, unit = root / "etc/actorserve/actorserve.toml", root / UNITS / "actorserve.service"
    settings.write_text("[http]\nport = 9000\n")
    unit.write_text("")
    repaired = run("--root", root, "--venv", sys.prefix)
    assert repaired.stdout.splitlines()[:-3] == [f"write {unit} (644, root:root)"]
    assert files(root) == before | {"etc/actorserve/actorserve.toml": "[http]\nport = 9000\n"}


def test_an_uninstallation_keeps_settings_until_a_purge(root: Path) -> None:
    """uninstall leaves the settings and keys, --purge takes them as well, and a second time there is nothing to do."""
    key = root / "etc/actorserve/keys/host.key"
    key.touch()
    assert run("uninstall", "--root", root).returncode == 0
    assert set(files(root)) == {
        f"etc/actorserve/{name}" for name in ("actorserve.toml", "all-settings.toml", "keys/host.key")
    }
    assert run("uninstall", "--root", root).stdout == "nothing to do\n"
    assert run("uninstall", "--root", root, "--purge").returncode == 0
    assert files(root) == {}
    assert "actorserve" not in (root / "etc/passwd").read_text() if os.geteuid() == 0 else True
    assert run("uninstall", "--root", root, "--purge").stdout == "nothing to do\n"


@needs_unshare
def test_missing_privileges_are_one_line() -> None:
    """A user who is not root gets one line that says what to do, before anything is changed."""
    done = run(inside=("unshare", "--user"))
    assert done.returncode == 1
    assert done.stderr == "tools/install: it needs root: use sudo, or --dry-run to see the steps, or --root DIR\n"
    assert done.stdout == ""


@as_root
@needs_unshare
def test_a_full_disk_is_one_line(tmp_path: Path) -> None:
    """A disk that is full is one line that names the file, which is not left behind half written."""
    script = f'mount -t tmpfs -o size=32k tmpfs {tmp_path} && "$@"; code=$?; ls {tmp_path}/etc/actorserve; exit $code'
    inside = ("unshare", "--mount", "sh", "-c", script, "sh")
    done = run("--root", tmp_path, "--venv", sys.prefix, inside=inside)
    file = tmp_path / "etc/actorserve/all-settings.toml"
    assert (done.returncode, done.stderr) == (1, f"tools/install: the disk is full; cannot write {file}\n")
    assert done.stdout.splitlines()[-2:] == ["actorserve.toml", "keys"]


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("--venv", "/no/such/folder", "--root", "/nowhere"), "/no/such/folder is not a virtual environment"),
        (("--venv", sys.prefix, "--root", "/proc/self"), "cannot change"),
    ],
)
def test_mistakes_are_one_line(arguments: tuple[str, ...], line: str) -> None:
    """A wrong environment or root ends with one line."""
    done = run(*arguments)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert line in done.stderr


# --- a host's share of a cluster ------------------------------------------------------------------------------------


def run_host(folder: Path, name: str, *arguments: object, cluster: str = CLUSTER) -> subprocess.CompletedProcess[str]:
    file = folder / "cluster.toml"
    file.write_text(cluster)
    return run("--host", name, "--cluster", file, "--root", folder / "root", "--venv", sys.prefix, *arguments)


def starts(root: Path, unit: str) -> str:
    """What a unit starts, by its drop-ins: the last word counts, after an empty one that takes back those before."""
    name = re.sub(r"@\d", "@", unit)
    files = [root / UNITS / name, *sorted((root / UNITS / f"{name}.d").glob("*.conf"))]
    lines = [line for file in files for line in file.read_text().splitlines() if line.startswith("ExecStart=")]
    return lines[-1].removeprefix("ExecStart=") if len(lines) == 1 or lines[-2] == "ExecStart=" else "several"


def test_a_hosts_share_is_laid_out(tmp_path: Path) -> None:
    """The units of a host start its share, the file of the cluster is kept, and the next steps name its processes."""
    dry = run_host(tmp_path, "alpha", "--dry-run")
    assert dry.returncode == 0
    assert not (tmp_path / "root").exists()
    done = run_host(tmp_path, "alpha")
    assert (done.returncode, done.stderr) == (0, "")
    assert len(dry.stdout.splitlines()) == len(done.stdout.splitlines()[:-3])
    root = tmp_path / "root"
    program, settings = "/usr/local/bin/actorserve", "--config /etc/actorserve/actorserve.toml"
    assert starts(root, "actorserve.service") == f"{program} host alpha --runtime-dir /run/actorserve {settings}"
    assert starts(root, "actorserve-prepare.service") == f"{program} host alpha --prepare /run/actorserve {settings}"
    assert starts(root, "actorserve-power.service") == f"{program} power --host alpha {settings}"
    assert (root / "etc/actorserve/cluster.toml").read_text() == CLUSTER
    words = "actorserve.target actorserve-coordinator actorserve-gateway@0 actorserve-worker@{0..2}"
    assert done.stdout.splitlines()[-1] == f"  systemctl enable --now {words}"
    assert run_host(tmp_path, "alpha").stdout == "nothing to do\n"
    moved = run_host(tmp_path, "beta")
    assert moved.stdout.splitlines()[-1] == "  systemctl enable --now actorserve.target actorserve-worker@0"
    assert " host beta " in starts(root, "actorserve.service")


def test_a_host_can_be_one_server_again(tmp_path: Path) -> None:
    """An installation without --host has the units start a whole server, and keeps the cluster's file."""
    assert run_host(tmp_path, "alpha").returncode == 0
    root = tmp_path / "root"
    assert run("--root", root, "--venv", sys.prefix).returncode == 0
    assert " serve " in starts(root, "actorserve.service")
    assert " serve " in starts(root, "actorserve-prepare.service")
    assert "--host" not in starts(root, "actorserve-power.service")
    assert (root / "etc/actorserve/cluster.toml").exists()
    assert run("uninstall", "--root", root).returncode == 0
    assert not list((root / UNITS).iterdir())


def test_mistakes_in_the_clusters_file_change_no_unit(tmp_path: Path) -> None:
    """A host that is not in the file, a file that is none, and a file with two hosts of one name are one line."""
    for cluster, name, line in (
        (CLUSTER, "gamma", "cluster.toml has no host gamma: its hosts are alpha, beta"),
        ("id = ", "alpha", "cannot read the cluster's file"),
        (CLUSTER.replace("beta", "alpha"), "alpha", "the cluster's file: two hosts are called alpha"),
        (CLUSTER.replace("kv_port", "kv_prot") + "kv_prot = 1\n", "alpha", "kv_prot"),
    ):
        done = run_host(tmp_path, name, cluster=cluster)
        assert (done.returncode, done.stderr.count("\n")) == (1, 1)
        assert line in done.stderr
        assert not (tmp_path / "root" / UNITS).exists()


@pytest.mark.parametrize(
    "arguments", [("--host", "alpha"), ("--cluster", "x"), ("uninstall", "--host", "a", "--cluster", "x")]
)
def test_a_share_needs_a_name_and_a_file(arguments: tuple[str, ...]) -> None:
    """One without the other is a wrong command line."""
    assert run(*arguments).returncode == 2


@needs_analyze
@pytest.mark.parametrize("name", ["actorserve.service", "actorserve-prepare.service", POWER])
def test_the_units_of_a_share_are_as_good(tmp_path: Path, name: str) -> None:
    """systemd-analyze has nothing to say about what a share's units start, and their exposure is as small."""
    assert run_host(tmp_path, "alpha").returncode == 0
    test_systemd_understands_the_units(tmp_path / "root", name)
    test_the_services_are_hardened(tmp_path / "root", name)


# --- the units -------------------------------------------------------------------------------------------------------


def service(name: str) -> dict[str, str]:
    """The assignments of a unit's section [Service], with those of the common drop-in."""
    found: dict[str, str] = {}
    for file in ("actorserve-.service.d/common.conf", re.sub(r"@\d", "@", name)):
        parser = RawConfigParser(strict=False)
        parser.optionxform = str  # type: ignore[assignment,method-assign]
        parser.read(ROOT / "config/systemd" / file)
        found |= parser["Service"]
    return found


def stub(root: Path) -> None:
    """Put what the units need of a system below ``root``."""
    for name in STUBS:
        (root / UNITS / name).write_text("[Unit]\n")
    (root / "bin").mkdir(exist_ok=True)
    shutil.copy(root / "usr/local/bin/actorserve", root / "bin/kill")


@needs_analyze
@pytest.mark.parametrize("name", [*SERVICES, *SERVICES_WITHOUT_GPU, POWER, "actorserve.target"])
def test_systemd_understands_the_units(root: Path, name: str) -> None:
    """systemd-analyze verify has nothing to say about any unit."""
    stub(root)
    command = ["systemd-analyze", "verify", "--man=no", f"--root={root}", name]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.stdout + done.stderr, done.returncode) == ("", 0)


@needs_analyze
def test_the_target_starts_what_is_enabled_in_an_order(root: Path) -> None:
    """The order of the processes, each of which is enabled, has no circle."""
    stub(root)
    wants = root / UNITS / "actorserve.target.wants"
    wants.mkdir()
    for name in (*SERVICES[2:], *SERVICES_WITHOUT_GPU):
        (wants / name).symlink_to(f"../{re.sub(r'@.', '@', name)}")
    command = ["systemd-analyze", "verify", "--man=no", f"--root={root}", "actorserve.target"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.stdout + done.stderr, done.returncode) == ("", 0)


@needs_analyze
@pytest.mark.parametrize("name", [*SERVICES, *SERVICES_WITHOUT_GPU, POWER])
def test_the_services_are_hardened(root: Path, name: str) -> None:
    """systemd-analyze security rates each service's exposure below the bound."""
    stub(root)
    command = ["systemd-analyze", "security", "--no-pager", "--offline=yes", f"--root={root}", name]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    level = re.search(r"Overall exposure level for .*: ([\d.]+)", done.stdout)
    assert level is not None, done.stderr
    assert float(level[1]) <= (MAX_EXPOSURE_OF_ROOT if name == POWER else MAX_EXPOSURE)


@pytest.mark.parametrize("name", SERVICES)
def test_gpus_and_triton_work_in_the_services_with_workers(name: str) -> None:
    """What would hide GPUs' device files or forbid compiled kernels is not set where a worker or its planning runs."""
    assert (
        service(name)
        .keys()
        .isdisjoint(
            {"PrivateDevices", "DevicePolicy", "DeviceAllow", "ProtectClock", "MemoryDenyWriteExecute", "ProcSubset"}
        )
    )


@pytest.mark.parametrize("name", [*SERVICES[:1], *SERVICES[2:], *SERVICES_WITHOUT_GPU])
def test_a_unit_has_time_to_drain(root: Path, name: str) -> None:
    """systemd waits longer for the end than the installed settings let requests drain, and watches the event loop."""
    settings, unit = load_settings(root / "etc/actorserve/actorserve.toml"), service(name)
    assert int(unit["TimeoutStopSec"]) > settings.http.lame_duck_s + settings.cluster.drain_timeout_s + GRACE_S
    assert unit["Type"] == "notify"
    assert int(unit["WatchdogSec"]) > 0
    assert unit["KillMode"] == "mixed", "a child of a process must not end before it"
    assert int(unit["LimitNOFILE"]) >= 65536


def test_the_coordinator_may_start_the_units_that_the_settings_name() -> None:
    """The rule for polkit allows exactly the units that scaling.unit names by default."""
    rule = (ROOT / "config/systemd/actorserve.rules").read_text()
    pattern = re.search(r"/(\^.*\$)/\.test", rule)
    assert pattern is not None
    unit = load_settings(None).scaling.unit.format(number=12)
    assert re.fullmatch(pattern[1].replace("\\.", "[.]"), unit)
    assert not re.fullmatch(pattern[1], f"{unit}.evil")
