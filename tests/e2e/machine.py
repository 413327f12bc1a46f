"""A small machine in namespaces, with a systemd of its own, in which the installed units really start.

Root inside is an ordinary user outside: the namespaces belong to a user namespace, whose users are users of this system
that nobody has. Inside one sees this system's ``/usr`` (read-only), and no other folder of it: ``/etc``, ``/run``,
``/tmp``, ``/var`` and the control groups are the machine's own. It has a loopback device, and no other network.
"""

import os
import pty
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.e2e.server import ROOT, wait_until

FIRST_ID = 1_000_000_000  # of the users outside
NUM_IDS = 65_536
FOLDERS = ("dev", "etc/systemd/system", "mnt", "opt", "outside", "proc", "run", "srv", "sys", "tmp", "usr")
DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
TARGETS = ("sysinit", "basic", "shutdown", "umount", "network-online", "multi-user")
PYTHONPATH = "/opt/packages:/opt/source"
LIBRARIES = "/opt/lib"  # where libraries are found that a test puts inside
INSIDE = "/mnt"  # where the tree is before it becomes the root
BOOT_S = 30.0
COMMAND_S = 180.0

OUTSIDE = f"""
set -eu
tree=$1 group=$2; shift 2
mount --bind "$tree" {INSIDE}
mount -t tmpfs -o mode=755,uid={FIRST_ID},gid={FIRST_ID} tmpfs {INSIDE}/dev
mkdir {INSIDE}/dev/pts {INSIDE}/dev/shm
ln -s pts/ptmx {INSIDE}/dev/ptmx
ln -s /proc/self/fd {INSIDE}/dev/fd
while [ $# -gt 0 ]; do
    [ -d "$1" ] && mkdir -p "{INSIDE}$2" || touch "{INSIDE}$2"
    mount --bind "$1" "{INSIDE}$2"
    mount -o "remount,bind,$3" "{INSIDE}$2"
    shift 3
done
unshare --user sleep 60 &
while [ "$(readlink /proc/$!/ns/user)" = "$(readlink /proc/self/ns/user)" ]; do sleep 0.01; done
echo "0 {FIRST_ID} {NUM_IDS}" > /proc/$!/uid_map
echo "0 {FIRST_ID} {NUM_IDS}" > /proc/$!/gid_map
echo $$ > "$group/cgroup.procs"
exec nsenter --target $! --user --setuid 0 --setgid 0 \\
    unshare --mount --pid --net --ipc --uts --cgroup --fork --kill-child=KILL sh -c "$INSIDE_SCRIPT"
"""
INSIDE_SCRIPT = f"""
set -eu
mount --rbind {INSIDE} {INSIDE}  # because a mount that came from outside cannot become the root
cd {INSIDE}
mount -t proc proc proc
mount -t sysfs -o ro sysfs sys
mount -t cgroup2 cgroup2 sys/fs/cgroup
mount -t devpts -o newinstance,ptmxmode=666,mode=620 devpts dev/pts
mount -t tmpfs -o mode=1777 tmpfs dev/shm
mount -t tmpfs -o mode=755 tmpfs run
mount -t tmpfs -o mode=1777 tmpfs tmp
ip link set lo up
hostname machine
pivot_root . outside
umount --lazy /outside
exec env -i container=other PATH=/usr/bin:/usr/sbin \\
    SYSTEMD_UNIT_PATH=/etc/systemd/system:/usr/local/lib/systemd/system \\
    /usr/lib/systemd/systemd --log-target=console --log-level=info --show-status=no --unit=multi-user.target
"""


class Machine:
    """A machine into which ``tools/install`` has installed this program.

    ``binds``: file outside -> its place inside. ``files``: further files inside -> their text.
    """

    def __init__(self, folder: Path, *install: str, binds: dict[Path, str], files: dict[str, str]) -> None:
        self.tree = folder / "machine"
        self._lay_out(install, files)
        self._group = _cgroups() / f"actorserve-test-{os.getpid()}-{time.monotonic_ns()}"
        self._group.mkdir()
        for name in (".", "cgroup.procs", "cgroup.threads", "cgroup.subtree_control"):
            os.chown(self._group / name, FIRST_ID, FIRST_ID)
        packages = next(path for path in sys.path if path.startswith(sys.prefix) and path.endswith("site-packages"))
        places = {Path("/usr"): "/usr", self.tree / "local": "/usr/local", Path(sys.base_prefix): "/opt/python"}
        places |= {Path(packages): "/opt/packages", ROOT: "/opt/source"} | binds
        words = [word for source, place in places.items() for word in (str(source), place, "ro,nosuid,nodev")]
        words += [word for name in DEVICES for word in (f"/dev/{name}", f"/dev/{name}", "nosuid")]
        self.console = folder / "console.log"
        terminal, inside = pty.openpty()
        os.fchown(inside, FIRST_ID, FIRST_ID)
        words += [os.ttyname(inside), "/dev/console", "nosuid"]
        threading.Thread(target=self._listen, args=(terminal,), daemon=True).start()
        unshare = ("unshare", "--mount", "--propagation", "private", "sh", "-c", OUTSIDE, "sh")
        self._process = subprocess.Popen(
            [*unshare, str(self.tree), str(self._group), *words],
            stdin=subprocess.DEVNULL,
            stdout=inside,
            stderr=inside,
            env={"PATH": os.environ["PATH"], "INSIDE_SCRIPT": INSIDE_SCRIPT},
            start_new_session=True,  # so that the terminal is nobody's
        )
        os.close(inside)

    def _listen(self, terminal: int) -> None:
        """Keep what systemd says on its console, until everything in the machine has ended."""
        with self.console.open("wb", buffering=0) as log, suppress(OSError):
            while text := os.read(terminal, 65536):
                log.write(text)
        os.close(terminal)

    @property
    def log(self) -> Path:
        """What the units' processes log."""
        return self.tree / "var/log/actorserve.log"

    def _lay_out(self, install: tuple[str, ...], files: dict[str, str]) -> None:
        command = [sys.executable, "-P", "-m", "tools.installing", "--root", str(self.tree), "--venv", sys.prefix]
        subprocess.run(
            [*command, *install],
            check=True,
            stdout=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            cwd=ROOT,
        )
        (self.tree / "usr/local/bin/actorserve").write_text(
            f"#!/bin/sh\nexport PYTHONPATH={PYTHONPATH} LD_LIBRARY_PATH=/opt/python/lib:{LIBRARIES}\n"
            'exec /opt/python/bin/python3 -P -m actorserve "$@"\n'
        )
        shutil.move(self.tree / "usr/local", self.tree / "local")
        for name in FOLDERS:
            (self.tree / name).mkdir(parents=True, exist_ok=True)
        for name in ("bin", "sbin", "lib", "lib64"):
            (self.tree / name).symlink_to(f"usr/{name}")
        etc = self.tree / "etc"
        self.log.parent.mkdir(parents=True)
        for unit in ("actorserve-", "actorserve"):  # there is no journal inside
            drop_in = etc / f"systemd/system/{unit}.service.d/log.conf"
            drop_in.parent.mkdir()
            drop_in.write_text("[Service]\nStandardOutput=append:/var/log/actorserve.log\nStandardError=inherit\n")
        for target in TARGETS:
            (etc / f"systemd/system/{target}.target").write_text("[Unit]\nDefaultDependencies=no\n")
        (etc / "nsswitch.conf").write_text("passwd: files\ngroup: files\nhosts: files\n")
        (etc / "hosts").write_text("127.0.0.1 localhost\n")
        (etc / "machine-id").write_text("0" * 31 + "1\n")
        shutil.copy("/etc/ld.so.cache", etc)
        for name, text in files.items():
            (self.tree / name).parent.mkdir(parents=True, exist_ok=True)
            (self.tree / name).write_text(text)
        for path in (self.tree, *self.tree.rglob("*")):
            facts = path.lstat()
            os.lchown(path, facts.st_uid + FIRST_ID, facts.st_gid + FIRST_ID)

    def pid(self) -> int | None:
        """The process id outside of the machine's systemd; None while there is none."""
        try:
            children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()
            names = {child: Path(f"/proc/{child}/comm").read_text() for child in children}
        except (FileNotFoundError, ProcessLookupError):  # a process has ended meanwhile
            return None
        return next((int(child) for child, name in names.items() if name == "systemd\n"), None)

    def boot(self) -> None:
        """Wait until systemd answers. Raises: AssertionError."""
        wait_until(lambda: self.pid() is not None or self._process.poll() is not None, "systemd's start", BOOT_S)
        assert self._process.poll() is None, self.console.read_text()
        wait_until(lambda: self.run("systemctl", "is-active", "multi-user.target").returncode == 0, "boot", BOOT_S)

    def start(self, *command: str) -> subprocess.Popen[str]:
        """Start a command inside, as root."""
        enter = ["nsenter", "--target", str(self.pid()), "--all", "--setuid", "0", "--setgid", "0", "--wd=/"]
        path = {"PATH": "/usr/local/bin:/usr/bin:/usr/sbin"}
        return subprocess.Popen(
            [*enter, *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=path,
        )

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command inside, as root, to its end."""
        with self.start(*command) as process:
            out, err = process.communicate(timeout=COMMAND_S)
        return subprocess.CompletedProcess(command, process.returncode, out, err)

    def systemctl(self, *arguments: str) -> str:
        """Raises: AssertionError with what systemd and the units have said, if it fails."""
        done = self.run("systemctl", *arguments)
        assert done.returncode == 0, f"{done.stderr}{self.console.read_text()}{self.log.read_text()}"
        return done.stdout.strip()

    def close(self) -> None:
        """End everything in the machine at once."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        wait_until(lambda: "populated 0" in (self._group / "cgroup.events").read_text(), "the machine's end")
        for group in sorted(self._group.rglob("*"), reverse=True):
            if group.is_dir():
                group.rmdir()
        self._group.rmdir()


def _cgroups() -> Path:
    """Where version 2 of control groups is mounted. Raises: StopIteration."""
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    return next(Path(fields[1]) for fields in mounts if fields[2] == "cgroup2")


@contextmanager
def machine(folder: Path, *install: str, binds: dict[Path, str], files: dict[str, str]) -> Iterator[Machine]:
    """A machine that is up. It ends at the end, with everything in it."""
    found = Machine(folder, *install, binds=binds, files=files)
    try:
        found.boot()
        yield found
    finally:
        found.close()
