"""Messages: instances' load reports, and which process gets them from where."""

from actorserve.core.messages.power import PowerReading
from actorserve.core.messages.rows import ONE_BLOCK_A_ROW, RowShape
from actorserve.core.messages.value import value
from actorserve.core.messages.values import Cordon, InstanceRole, Peer


@value
class LoadReport:
    """w -> c, and g if it wants them, numbered: an instance's load as its own scheduler sees it.

    ``kv_*`` is the device's pool, ``host_*`` the pool that KV is swapped to; host blocks that hold other instances'
    checkpoints count in neither ``host_*`` field. Unless stated otherwise, counts are since the instance started.

    - ``virtual_usage_bytes`` is the sum of V over its requests (``core.placement.freeness``). It includes
      ``kv_reserved_bytes``, the blocks that incoming migrations and handoffs hold, and ``kv_head_bytes``, the
      demand of the first waiting request. ``kv_wanted_bytes`` is the demand of all waiting requests.
    - ``kv_needed_bytes`` is the whole KV of all started requests, wherever it lies, and ``kv_reserved_bytes``.
    - ``kv_yielding_bytes`` is the demand of preempted requests that leave memory to new ones if need be. It is part of
      ``kv_needed_bytes`` and ``kv_wanted_bytes``.
    - ``pending_prompt_tokens`` is what is left to compute of the prompts that wait or are being computed. A prompt that
      is computed again after a preemption counts with its output so far.
    - ``accepted`` names the requests that arrived since the previous report, so that the coordinator can drop them from
      its own account of requests in flight.
    - ``num_tokens_looked_up`` tokens of newly admitted requests were looked up in the prefix cache, and
      ``num_tokens_found`` were found there. Recomputing after a preemption does not count.
    - ``num_swapped`` requests lie on the host now. There were ``num_swap_outs`` swaps to the host, and swaps in both
      directions copied ``swapped_bytes``. ``swap_blocked_s`` sums how long requests that were due for the batch waited
      for such copies.
    - ``num_migrating`` requests are in flight now, in both directions. Of the outgoing ones ``num_migrated`` were
      handed over, with ``migrated_bytes`` of KV, and ``num_migrations_failed`` stayed.
    - ``checkpointed_bytes`` were copied into another worker's host memory.
    - ``num_running`` requests hold KV and ``num_waiting`` do not; ``num_in_batch`` of them are in the newest iteration.
    - ``num_output_tokens`` were generated.
    - ``cordon`` is what an operator ordered of this worker last.
    - ``num_by_level`` counts the requests in each level of its feedback queue, the most urgent level first; it is empty
      if the scheduling policy has no levels.
    - ``role`` is the instance's role. ``num_decoding`` requests here have no prompt left to compute, and are not being
      handed off to a token instance. Their KV, wherever it lies, is ``kv_decoding_bytes``.
    - ``power`` is the last reading of the power of what the instance computes on; None: nothing tells it.
    - ``prompt_energy_j`` and ``token_energy_j`` were spent on requests, by phase (``core.power.accounting``); None: the
      energy is not known.
    - ``decode_s`` is the time of an iteration that decodes all started requests, by the profile; 0 without requests.
    - ``row_shape`` says how many blocks of ``bytes_per_block`` a request of some length needs.
    """

    sequence: int
    num_running: int
    num_waiting: int
    kv_total_bytes: int
    kv_used_bytes: int
    virtual_usage_bytes: int
    bytes_per_block: int
    tokens_per_block: int
    num_preemptions: int
    accepted: tuple[str, ...] = ()
    draining: bool = False
    num_tokens_looked_up: int = 0
    num_tokens_found: int = 0
    host_total_bytes: int = 0
    host_used_bytes: int = 0
    kv_needed_bytes: int = 0
    num_swapped: int = 0
    num_swap_outs: int = 0
    swapped_bytes: int = 0
    swap_blocked_s: float = 0.0
    num_migrating: int = 0
    num_migrated: int = 0
    num_migrations_failed: int = 0
    migrated_bytes: int = 0
    kv_reserved_bytes: int = 0
    kv_wanted_bytes: int = 0
    checkpointed_bytes: int = 0
    pending_prompt_tokens: int = 0
    row_shape: RowShape = ONE_BLOCK_A_ROW
    kv_head_bytes: int = 0
    kv_yielding_bytes: int = 0
    num_in_batch: int = 0
    cordon: Cordon = Cordon.OPEN
    num_output_tokens: int = 0
    num_by_level: tuple[int, ...] = ()
    role: InstanceRole = InstanceRole.MIXED
    num_decoding: int = 0
    power: PowerReading | None = None
    decode_s: float = 0.0
    prompt_energy_j: float | None = None
    token_energy_j: float | None = None
    kv_decoding_bytes: int = 0


@value
class LoadDigest:
    """c -> g: the last load report of each worker, without ``accepted``, as parallel columns.

    A gateway places requests by it when the coordinator is gone, until workers report to the gateway themselves.
    The gateways of the host ``shown_on``, and no others, show the reports in their metrics, so that a sum over all
    gateways counts each worker once.
    """

    workers: tuple[Peer, ...]
    reports: tuple[LoadReport, ...]
    shown_on: str = ""


@value
class WantReports:
    """g -> w: whether this gateway wants the worker's own load reports, because it has no coordinator."""

    wanted: bool
