"""``tools/install``: lays out what one host needs to run servers as units of systemd, and takes it away again."""

import argparse
import errno
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tools.installing.share import ONE_HOST, Share, read_share
from tools.installing.steps import InstallError, Owner, Step, command, file, folder, gone

SOURCE = Path(__file__).resolve().parents[2]
USER = "actorserve"
SETTINGS = """\
# The settings of this host's server: only what differs from the defaults. all-settings.toml beside this file shows all.
# Check it after a change, and then: systemctl restart actorserve.target (or actorserve.service)

[http]
# Load balancers that ask /ready have this many seconds to send requests elsewhere before a gateway stops.
lame_duck_s = 5.0
"""
PROGRAM_PARTS = ("pyproject.toml", "README.md", "LICENSE", "actorserve", "workers")
HOST_UNITS = {
    "actorserve.service": "host {name} --runtime-dir /run/actorserve",
    "actorserve-prepare.service": "host {name} --prepare /run/actorserve",
    "actorserve-power.service": "power --host {name}",
}
"""The units that must know the host's name on a host of a cluster, and what they run there."""
HOST_UNIT = """\
# Written by tools/install, for the host {name} of the cluster in /etc/actorserve/cluster.toml.

[Service]
ExecStart=
ExecStart=/usr/local/bin/actorserve {command} --config /etc/actorserve/actorserve.toml
"""
ENABLE = """\
next:
  systemctl enable --now actorserve.service      # {what}; or each process as a unit:
  systemctl enable --now {units}
"""


class Layout:
    """Where everything lies below ``root``. ``environment``: a virtual environment that has actorserve already; None:
    one is made in ``prefix``.
    """

    def __init__(self, root: Path, prefix: Path, environment: Path | None, share: Share = ONE_HOST) -> None:
        self.root = root
        self.share = share
        self.prefix = self.at(prefix)
        self._environment = environment
        self._python = (environment or prefix / "venv") / "bin" / "python"
        self.config = self.at("/etc/actorserve")
        self.cluster = self.config / "cluster.toml"
        self.program = self.at("/usr/local/bin/actorserve")
        self.units = self.at("/usr/local/lib/systemd/system")
        self.users = self.at("/usr/local/lib/sysusers.d/actorserve.conf")
        self.polkit = self.at("/etc/polkit-1/rules.d/50-actorserve.rules")
        self.cache = self.at("/var/cache/actorserve")
        self.is_live = root == Path("/") and Path("/run/systemd/system").exists()
        self._root_owned = Owner("root", "root", root)

    def at(self, path: str | Path) -> Path:
        return self.root / Path(path).relative_to("/")

    def install(self) -> Iterator[Step]:
        yield file(self.users, _text("config/systemd/sysusers.conf"), 0o644, self._root_owned)
        etc = self.at("/etc")
        yield Step(f"make {etc}", lambda: etc.mkdir(parents=True), etc.exists)
        if os.geteuid() == 0:
            has_user = Owner(USER, USER, self.root)
            yield command(
                f"make the system user {USER}",
                ("systemd-sysusers", f"--root={self.root}", "actorserve.conf"),
                lambda: _exists(has_user),
            )
        private, readable = Owner(USER, USER, self.root), Owner("root", USER, self.root)
        yield folder(self.config, 0o750, readable)
        yield folder(self.config / "keys", 0o700, private)
        yield file(self.config / "actorserve.toml", SETTINGS, 0o640, readable, keeps=True)
        yield file(self.config / "all-settings.toml", _text("config/actorserve.toml"), 0o640, readable)
        yield from self._program()
        if self.share.name:
            write = file(self.cluster, self.share.text, 0o640, readable)
            # Nothing is written if it has mistakes.
            yield Step(f"check the cluster's file for host {self.share.name}", self._check_cluster, write.is_done)
            yield write
        wrapper = f'#!/bin/sh\nexec {self._python} -P -m actorserve "$@"\n'
        yield file(self.program, wrapper, 0o755, self._root_owned)
        for path, text in self._unit_files().items():
            yield file(path, text, 0o644, self._root_owned)
        for path, text in self._host_units().items():
            yield file(path, text, 0o644, self._root_owned) if self.share.name else gone(path)
        yield file(self.polkit, _text("config/systemd/actorserve.rules"), 0o644, self._root_owned)
        if self.is_live:
            yield command("have systemd read the units", ("systemctl", "daemon-reload"))

    def uninstall(self, *, purge: bool) -> Iterator[Step]:
        """``purge``: settings, keys, caches and the user go, too."""
        if self.is_live:
            names = [path.name for path in self._unit_files() if "@" not in path.name and path.suffix != ".conf"]
            yield command("stop and disable the units", ("systemctl", "disable", "--now", *names), self._no_units)
        enabled = self.at("/etc/systemd/system/actorserve.target.wants")
        folders = {*self._drop_ins(), *(path.parent for path in self._host_units())}
        runtime = self.at("/run/actorserve")
        others = (enabled, runtime, self.polkit, self.users, self.program, self.prefix)
        for path in (*self._unit_files(), *sorted(folders), *others):
            yield gone(path)
        if purge:
            yield gone(self.config)
            yield gone(self.cache)
            if os.geteuid() == 0:
                here = Owner(USER, USER, self.root)
                prefix = () if self.root == Path("/") else ("--prefix", self.root)
                yield command(f"remove the system user {USER}", ("userdel", *prefix, USER), lambda: not _exists(here))
        if self.is_live:
            yield command("have systemd forget the units", ("systemctl", "daemon-reload"))

    def _program(self) -> Iterator[Step]:
        if self._environment is not None:
            return
        venv = self.prefix / "venv"
        python = venv / "bin" / "python"
        yield command(f"make {venv}", (sys.executable, "-m", "venv", venv), python.exists)

        def install() -> None:
            with tempfile.TemporaryDirectory() as copy:  # because building leaves files in the folder
                for part in PROGRAM_PARTS:
                    if (SOURCE / part).is_dir():
                        shutil.copytree(SOURCE / part, Path(copy) / part)
                    else:
                        shutil.copy(SOURCE / part, copy)
                pins = SOURCE / "config/constraints.txt"
                pip = (python, "-I", "-m", "pip", "install", "--no-input", "--disable-pip-version-check", "-q")
                command("", (*pip, "--constraint", pins, "--upgrade", copy)).act()

        yield Step(f"install actorserve and its packages into {venv} (this takes minutes)", install, lambda: False)

    def _check_cluster(self) -> None:
        """Raises: InstallError."""
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(folder) / "cluster.toml"
            copy.write_text(self.share.text, encoding="utf-8")
            python = (self._environment or self.prefix / "venv") / "bin" / "python"
            settings = self.config / "actorserve.toml"  # because some settings do not fit to some clusters
            words = [python, "-P", "-m", "actorserve", "config", "check", settings, copy]
            done = subprocess.run(list(map(str, words)), capture_output=True, text=True, check=False)
        if done.returncode != 0:
            lines = [line for line in done.stdout.splitlines() if not line.endswith(": ok")] or done.stderr.splitlines()
            raise InstallError("; ".join(line.replace(str(copy), "the cluster's file") for line in lines))

    def _host_units(self) -> dict[Path, str]:
        name = self.share.name
        return {
            self.units / f"{unit}.d" / "host.conf": HOST_UNIT.format(name=name, command=command.format(name=name))
            for unit, command in HOST_UNITS.items()
        }

    def _unit_files(self) -> dict[Path, str]:
        source = SOURCE / "config/systemd"
        found = {
            self.units / path.name: path.read_text(encoding="utf-8")
            for path in sorted(source.iterdir())
            if path.suffix in (".service", ".target")
        }
        common = _text("config/systemd/actorserve-.service.d/common.conf")
        *for_all, power = self._drop_ins()
        found |= {folder / "common.conf": common for folder in for_all}
        return found | {power / "power.conf": _text(f"config/systemd/{power.name}/power.conf")}

    def _drop_ins(self) -> tuple[Path, ...]:
        names = ("actorserve-.service.d", "actorserve.service.d", "actorserve-power.service.d")
        return tuple(self.units / name for name in names)

    def _no_units(self) -> bool:
        return not any(path.exists() for path in self._unit_files())


def perform(steps: Iterator[Step], *, is_dry: bool) -> int:
    """Do the steps that are not done, and print each. Returns how many there were."""
    num_done = 0
    for step in steps:
        if not step.is_done():
            print(f"would {step.text}" if is_dry else step.text, flush=True)
            num_done += 1
            if not is_dry:
                step.act()
    return num_done


def _text(path: str) -> str:
    return (SOURCE / path).read_text(encoding="utf-8")


def _exists(owner: Owner) -> bool:
    try:
        owner.ids()
    except InstallError:
        return False
    return True


@contextmanager
def _one_line_errors() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        where = f" {error.filename}" if error.filename else ""
        if error.errno == errno.ENOSPC:
            raise InstallError(f"the disk is full; cannot write{where}") from None
        raise InstallError(f"cannot change{where}: {error.strerror or error}") from None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tools/install", description=__doc__)
    parser.add_argument("verb", nargs="?", choices=("install", "uninstall"), default="install")
    parser.add_argument("--host", metavar="NAME", help="install this host's share of a cluster")
    parser.add_argument(
        "--cluster", type=Path, metavar="FILE", help="the cluster's file, which is kept as /etc/actorserve/cluster.toml"
    )
    parser.add_argument("--dry-run", action="store_true", help="print each step, and do none")
    parser.add_argument("--root", type=Path, default=Path("/"), metavar="DIR", help="folder that stands for / (/)")
    parser.add_argument(
        "--prefix", type=Path, default=Path("/opt/actorserve"), metavar="DIR", help="program's folder (/opt/actorserve)"
    )
    parser.add_argument(
        "--venv", type=Path, metavar="DIR", help="use this virtual environment, and install no packages"
    )
    parser.add_argument("--purge", action="store_true", help="uninstall settings, keys, caches and the user, too")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0, 1 for a failure of one line, 2 for a wrong command line."""
    parser = _parser()
    given = parser.parse_args(arguments)
    if given.purge and given.verb != "uninstall":
        parser.error("--purge goes with uninstall")
    if (given.host is None) != (given.cluster is None):
        parser.error("--host and --cluster go together")
    if given.host is not None and given.verb != "install":
        parser.error("--host goes with install")
    if not given.prefix.is_absolute():
        parser.error(f"--prefix is {given.prefix}: expected an absolute path")
    try:
        with _one_line_errors():
            root = given.root.absolute()
            if root == Path("/") and os.geteuid() != 0 and not given.dry_run:
                raise InstallError("it needs root: use sudo, or --dry-run to see the steps, or --root DIR")
            environment = None if given.venv is None else given.venv.absolute()
            if environment is not None and not (environment / "bin/python").exists():
                raise InstallError(f"{environment} is not a virtual environment")
            share = ONE_HOST if given.host is None else read_share(given.cluster, given.host)
            layout = Layout(root, given.prefix, environment, share)
            is_install = given.verb == "install"
            steps = layout.install() if is_install else layout.uninstall(purge=given.purge)
            if perform(steps, is_dry=given.dry_run) == 0:
                print("nothing to do")
            elif is_install and not given.dry_run:
                what = f"{share.name}'s share as one unit" if share.name else "a whole server on this host"
                print(ENABLE.format(what=what, units=share.units), end="")
    except InstallError as error:
        print(f"tools/install: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
