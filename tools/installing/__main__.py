"""``tools/install``: lays out what one host needs to run servers as units of systemd, and takes it away again."""

import argparse
import errno
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

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
ENABLE = """\
next:
  systemctl enable --now actorserve.service      # a whole server on this host; or each process as a unit:
  systemctl enable --now actorserve.target actorserve-coordinator actorserve-gateway@0 actorserve-worker@{0,1}
"""


class Layout:
    """Where everything lies below ``root``. ``environment``: a virtual environment that has actorserve already; None:
    one is made in ``prefix``.
    """

    def __init__(self, root: Path, prefix: Path, environment: Path | None) -> None:
        self.root = root
        self.prefix = self.at(prefix)
        self._environment = environment
        self._python = (environment or prefix / "venv") / "bin" / "python"
        self.config = self.at("/etc/actorserve")
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
        wrapper = f'#!/bin/sh\nexec {self._python} -P -m actorserve "$@"\n'
        yield file(self.program, wrapper, 0o755, self._root_owned)
        for path, text in self._unit_files().items():
            yield file(path, text, 0o644, self._root_owned)
        yield file(self.polkit, _text("config/systemd/actorserve.rules"), 0o644, self._root_owned)
        if self.is_live:
            yield command("have systemd read the units", ("systemctl", "daemon-reload"))

    def uninstall(self, *, purge: bool) -> Iterator[Step]:
        """``purge``: settings, keys, caches and the user go, too."""
        if self.is_live:
            names = [path.name for path in self._unit_files() if "@" not in path.name and path.suffix != ".conf"]
            yield command("stop and disable the units", ("systemctl", "disable", "--now", *names), self._no_units)
        enabled = self.at("/etc/systemd/system/actorserve.target.wants")
        others = (enabled, self.polkit, self.users, self.program, self.prefix)
        for path in (*self._unit_files(), *self._drop_ins(), *others):
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

    def _unit_files(self) -> dict[Path, str]:
        source = SOURCE / "config/systemd"
        found = {
            self.units / path.name: path.read_text(encoding="utf-8")
            for path in sorted(source.iterdir())
            if path.suffix in (".service", ".target")
        }
        common = _text("config/systemd/actorserve-.service.d/common.conf")
        return found | {folder / "common.conf": common for folder in self._drop_ins()}

    def _drop_ins(self) -> tuple[Path, ...]:
        return (self.units / "actorserve-.service.d", self.units / "actorserve.service.d")

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
            layout = Layout(root, given.prefix, environment)
            is_install = given.verb == "install"
            steps = layout.install() if is_install else layout.uninstall(purge=given.purge)
            if perform(steps, is_dry=given.dry_run) == 0:
                print("nothing to do")
            elif is_install and not given.dry_run:
                print(ENABLE, end="")
    except InstallError as error:
        print(f"tools/install: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
