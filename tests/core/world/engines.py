"""The engines of a world: the test decides when each iteration, swap, copy and grammar ends."""

from abc import ABC, abstractmethod
from collections import deque

from actorserve.core.effects import Fetch, SwapOut
from actorserve.core.instance.state import InstanceState
from actorserve.core.kv.tickets import is_genuine
from actorserve.core.messages import CopyDone, CopyFailed, Message, Peer, Tick
from tests.core.world.kv_contents import check_read_kv
from tests.core.world.parts import KEY, Client, Process
from workers.kv.layer_progress import mark


class Engines(ABC):
    """The part of a world that drives its workers' engines."""

    def __init__(self) -> None:
        self.now = 0.0
        self.processes: dict[str, Process] = {}
        self.lives: list[Process] = []  # every process that ever ran
        self.clients: dict[str, Client] = {}

    @abstractmethod
    def _handle(self, process: Process, message: Message, sender: Peer | None = None) -> None:
        """The process's core gets a message, and what it wants is done."""

    def plan_ahead(self, name: str) -> None:
        """The iteration in flight on a worker is about to end, so the worker plans the next one."""
        process = self.processes[name]
        assert isinstance(process.core, InstanceState)
        at_s = process.core.steps.next_plan_s
        if at_s is not None:
            self.now = max(self.now, at_s)
            self._handle(process, Tick())

    def finish_step(self, name: str) -> None:
        """The engine of a worker completes the oldest iteration in flight."""
        process = self.processes[name]
        if process.computed is None:
            check_read_kv(process, self.clients)
        self._handle(process, process.step())

    def compute_step(self, name: str) -> None:
        """The engine of a worker completes the oldest iteration in flight. Its core is told by ``finish_step``."""
        process = self.processes[name]
        if process.computed is None:
            check_read_kv(process, self.clients)
        process.compute()

    def finish_compiling(self, name: str, index: int = 0) -> None:
        """One of the grammars that a worker compiles is ready."""
        process = self.processes[name]
        self._handle(process, process.compile(index))

    def finish_copy(self, name: str) -> None:
        """The engine of a worker completes its oldest swap."""
        process = self.processes[name]
        copy = process.copies.popleft()
        assert process.engine is not None
        if isinstance(copy, SwapOut):
            process.engine.copy_out(copy.device_blocks, copy.host_blocks)
        else:
            process.engine.copy_in(copy.host_blocks, copy.device_blocks)
        self._handle(process, CopyDone(copy.copy_id, 0.01))

    def finish_fetch(self, name: str, *, failed: bool = False) -> None:
        """A worker completes its oldest copy from another worker, with whatever lies in that memory now.

        A copy that failed may have written some of its blocks (``tear_fetch``). A copy fails if its source has died in
        the iteration that writes the KV.
        """
        process = self.processes[name]
        fetch = process.fetches[0]
        failed = failed or not self._is_written(process, fetch)
        if not failed:
            self._read(process, fetch, len(fetch.blocks))
        process.fetches.popleft()
        process.num_read = 0
        self._handle(process, CopyFailed(fetch.copy_id) if failed else CopyDone(fetch.copy_id, 0.01))

    def tear_fetch(self, name: str) -> None:
        """A worker's oldest copy from another worker reads half of what is left now, and the other blocks later."""
        process = self.processes[name]
        fetch = process.fetches[0]
        if self._is_written(process, fetch):
            self._read(process, fetch, (process.num_read + len(fetch.blocks)) // 2)

    def _is_written(self, process: Process, fetch: Fetch) -> bool:
        """Whether no iteration still writes the KV of this copy, as far as the process knows. It waits until then."""
        source = self.lives[int(fetch.access.address)].engine
        assert source is not None
        step_id = fetch.ticket.step_id if process.follows else 0
        return not step_id or source.progress.value >= mark(step_id, 1)

    def _may_end(self, process: Process, fetch: Fetch) -> bool:
        """Whether this copy can end now: it is not waiting for a live source's iteration."""
        source = self.lives[int(fetch.access.address)]
        return self._is_written(process, fetch) or self.processes.get(source.peer.name) is not source

    def _read(self, process: Process, fetch: Fetch, end: int) -> None:
        """Read the blocks of a copy up to ``end``, except those that were read before."""
        source = self.lives[int(fetch.access.address)].engine  # even after its death, because its memory is mapped here
        ticket, begin = fetch.ticket, process.num_read
        assert source is not None
        assert process.engine is not None
        assert is_genuine(KEY, ticket)
        process.engine.fetch_from(
            source,
            ticket.blocks[fetch.num_skipped + begin : fetch.num_skipped + end],
            fetch.blocks[begin:end],
            on_host=ticket.on_host,
            into_host=fetch.into_host,
        )
        process.num_read = end

    @property
    def stepping(self) -> list[str]:
        return [name for name, process in self.processes.items() if process.commands]

    @property
    def copying(self) -> list[str]:
        return [name for name, process in self.processes.items() if process.copies]

    @property
    def compiling(self) -> list[str]:
        return [name for name, process in self.processes.items() if process.compiling]

    @property
    def fetching(self) -> list[str]:
        """The workers with a copy from another worker that can end. It comes before those that wait for iterations."""
        found = []
        for name, process in self.processes.items():
            ready = [fetch for fetch in process.fetches if self._may_end(process, fetch)]
            if ready:
                process.fetches = deque([*ready, *(fetch for fetch in process.fetches if fetch not in ready)])
                found.append(name)
        return found
