"""An instance's load reports: what they say of its memory and requests, and when they are sent."""

from collections.abc import Callable, Mapping, Sequence

from actorserve.core.checkpoints.source import CheckpointSource
from actorserve.core.effects import Effects
from actorserve.core.kv.kv_memory import KVMemory
from actorserve.core.messages import Cordon, InstanceRole, LoadReport, Peer, PowerReading
from actorserve.core.migration.destination import MigrationDestination
from actorserve.core.migration.source import MigrationSource
from actorserve.core.placement.freeness import virtual_usage_bytes
from actorserve.core.power.accounting import EnergyAccount
from actorserve.core.request import Request
from actorserve.core.scheduling.batching import Batcher
from actorserve.core.timing.profile import Profile


class LoadReporter:
    """Sends numbered reports to the coordinator, and to gateways without one: at once to a new listener, then every
    ``every_s``.
    """

    def __init__(
        self, make_report: Callable[[int, tuple[str, ...]], LoadReport], every_s: float, effects: Effects
    ) -> None:
        """``make_report`` gives the current load, with this number and these arrivals."""
        self.next_report_s: float | None = None
        self._make_report = make_report
        self._every_s = every_s
        self._effects = effects
        self._listeners: dict[str, Peer] = {}
        self._sequence = 0
        self._accepted: list[str] = []  # requests that arrived since the last report

    def accept(self, request_id: str) -> None:
        """Name this request in the next report."""
        self._accepted.append(request_id)

    def add_listener(self, peer: Peer, now: float) -> None:
        self._listeners[peer.name] = peer
        self._effects.send(peer, self._make_report(self._sequence, ()))
        if self.next_report_s is None:
            self.next_report_s = now + self._every_s

    def drop_listener(self, peer: Peer) -> None:
        """Other peers are ignored."""
        if self._listeners.get(peer.name) == peer:
            del self._listeners[peer.name]

    def on_tick(self, now: float) -> None:
        if self.next_report_s is not None and now >= self.next_report_s:
            self.send()
            self.next_report_s = now + self._every_s if self._listeners else None

    def send(self) -> None:
        """Report now, in addition to the regular reports."""
        accepted, self._accepted = tuple(self._accepted), []
        self._sequence += 1
        report = self._make_report(self._sequence, accepted)
        for peer in self._listeners.values():
            self._effects.send(peer, report)


def make_report(
    memory: KVMemory,
    order: Sequence[Request],
    headroom_bytes: Mapping[int, int],
    batcher: Batcher,
    source: MigrationSource,
    destination: MigrationDestination,
    checkpoints: CheckpointSource,
    *,
    num_in_batch: int,
    is_draining: bool,
    cordon: Cordon,
    role: InstanceRole,
    num_output_tokens: int,
    num_by_level: Sequence[int],
    power: PowerReading | None,
    energy: EnergyAccount,
    profile: Profile,
    sequence: int,
    accepted: tuple[str, ...],
) -> LoadReport:
    """A report of the two pools, of all requests, given in scheduling order, and of what they did."""
    bytes_per_block = memory.bytes_of_blocks(1)
    num_usable = memory.device.num_usable_blocks
    num_host = memory.host.num_blocks - memory.num_checkpoint_blocks
    waiting = [request for request in order if not request.is_started]
    wanted_bytes = [memory.bytes_of_blocks(memory.blocks_wanted(request)) for request in waiting]
    num_started = len(order) - len(waiting)
    decoding = [request for request in order if request.is_decoding and not source.hands_off(request)]
    return LoadReport(
        sequence=sequence,
        num_running=num_started,
        num_waiting=len(waiting),
        kv_total_bytes=num_usable * bytes_per_block,
        kv_used_bytes=(num_usable - memory.device.num_free_blocks) * bytes_per_block,
        virtual_usage_bytes=virtual_usage_bytes(
            order, memory.held_blocks, memory.blocks_wanted, bytes_per_block, headroom_bytes
        ),
        bytes_per_block=bytes_per_block,
        tokens_per_block=memory.tokens_per_block,
        num_preemptions=batcher.num_preemptions,
        accepted=accepted,
        draining=is_draining,
        num_tokens_looked_up=memory.prefixes.num_tokens_looked_up,
        num_tokens_found=memory.prefixes.num_tokens_found,
        host_total_bytes=num_host * bytes_per_block,
        host_used_bytes=(num_host - memory.host.num_free_blocks) * bytes_per_block,
        kv_needed_bytes=memory.held_blocks * bytes_per_block,
        num_swapped=sum([request.is_swapped for request in order]),
        num_swap_outs=memory.num_swap_outs,
        swapped_bytes=memory.num_copied_blocks * bytes_per_block,
        swap_blocked_s=batcher.blocked_s,
        num_migrating=len(source) + len(destination),
        num_migrated=source.num_migrated,
        num_migrations_failed=source.num_failed,
        migrated_bytes=source.migrated_bytes,
        kv_reserved_bytes=destination.num_blocks * bytes_per_block,
        kv_wanted_bytes=sum(wanted_bytes),
        checkpointed_bytes=checkpoints.checkpointed_bytes,
        pending_prompt_tokens=sum([left for request in order if (left := request.num_without_kv) > 1]),
        row_shape=memory.rows.shape,
        kv_head_bytes=wanted_bytes[0] if wanted_bytes else 0,
        kv_yielding_bytes=memory.bytes_of_blocks(batcher.num_yielding_blocks(order)),
        num_in_batch=num_in_batch,
        cordon=cordon,
        num_output_tokens=num_output_tokens,
        num_by_level=tuple(num_by_level),
        role=role,
        num_decoding=len(decoding),
        power=power,
        prompt_energy_j=energy.prompt_j if energy.is_open else None,
        token_energy_j=energy.token_j if energy.is_open else None,
        decode_s=profile.decode_s(num_started, memory.held_blocks * memory.tokens_per_block) if num_started else 0.0,
        kv_decoding_bytes=sum([_num_blocks(request, memory) for request in decoding]) * bytes_per_block,
    )


def _num_blocks(request: Request, memory: KVMemory) -> int:
    """The blocks that it has on the device, or needs there. During quiet steps its tokens are not up to date."""
    return memory.num_held(request) if request.blocks else memory.blocks_of(request)
