"""A link between two network namespaces that delays packets, loses some, has a rate, and can be cut.

Each namespace has a TUN device, and this process carries packets from one to the other, because not every kernel can
delay them (netem). The hosts have the addresses 127.0.0.1 and 127.0.0.2, of which each namespace has one.
"""

import fcntl
import heapq
import os
import random
import select
import socket
import struct
import subprocess
import sys
import threading
import time
from typing import Final

_TUNSETIFF: Final = 0x400454CA
_TUN_WITHOUT_HEADER: Final = 0x0001 | 0x1000
_MTU: Final = 1500
_MAX_QUEUE_S: Final = 0.2  # of a slow link, which loses what would wait for longer


def open_end(own: str, other: str) -> int:
    """Give this process's network namespace the address ``own``, and a device to ``other``. Returns its descriptor."""
    end = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(end, _TUNSETIFF, struct.pack("16sH", b"link", _TUN_WITHOUT_HEADER))
    for setting in ("all/route_localnet", "default/route_localnet", "link/route_localnet"):
        with open(f"/proc/sys/net/ipv4/conf/{setting}", "w", encoding="ascii") as file:
            file.write("1")
    for words in (
        "link set dev lo up",
        "address flush dev lo",
        f"address add {own}/32 dev lo",
        f"link set dev link mtu {_MTU} up",
        f"route add {other}/32 dev link src {own}",
    ):
        subprocess.run(["ip", *words.split()], check=True)
    return end


class Link:
    """Runs in a thread until ``close``. This process is in the first namespace, and a child keeps the second one."""

    def __init__(self) -> None:
        self.delay_s = 0.0
        self.loss = 0.0  # share of packets
        self.bytes_per_s: float | None = None
        self.is_cut = False
        self.num_lost = 0
        self.num_carried = 0
        self._alive, there = socket.socketpair()  # the child ends when this end is closed
        self._child = subprocess.Popen(
            ["unshare", "--net", sys.executable, "-P", "-m", "tests.e2e.link", str(there.fileno())],
            pass_fds=[there.fileno()],
        )
        there.close()
        _, (far,), _, _ = socket.recv_fds(self._alive, 1, 1)
        self._ends = (open_end("127.0.0.1", "127.0.0.2"), far)
        self._is_open = True
        self._thread = threading.Thread(target=self._carry, daemon=True)
        self._thread.start()

    @property
    def prefix(self) -> tuple[str, ...]:
        """The command that runs a program in the second namespace."""
        return ("nsenter", f"--net=/proc/{self._child.pid}/ns/net")

    def close(self) -> None:
        self._is_open = False
        self._thread.join()
        self._alive.close()
        self._child.wait()

    def _carry(self) -> None:
        flying: list[tuple[float, int, int, bytes]] = []  # when it arrives, its number, where, and the packet
        free_s = [0.0, 0.0]  # when each direction has sent what came before
        number = 0
        while self._is_open:
            now = time.monotonic()
            while flying and flying[0][0] <= now:
                _, _, end, packet = heapq.heappop(flying)
                os.write(end, packet)
            wait_s = min(0.05, max(0.0, flying[0][0] - now)) if flying else 0.05
            for end in select.select(self._ends, (), (), wait_s)[0]:
                direction = self._ends.index(end)
                packet = os.read(end, 65536)
                now = time.monotonic()
                start_s = max(now, free_s[direction])
                if self.is_cut or random.random() < self.loss or start_s - now > _MAX_QUEUE_S:
                    self.num_lost += 1
                    continue
                self.num_carried += 1
                number += 1
                free_s[direction] = start_s + (0.0 if self.bytes_per_s is None else len(packet) / self.bytes_per_s)
                heapq.heappush(flying, (free_s[direction] + self.delay_s, number, self._ends[1 - direction], packet))


def main() -> None:
    """Keep a namespace with the second end, and hand the end over."""
    with socket.socket(fileno=int(sys.argv[1])) as parent:
        socket.send_fds(parent, [b"x"], [open_end("127.0.0.2", "127.0.0.1")])
        parent.recv(1)  # until the parent ends


if __name__ == "__main__":
    main()
