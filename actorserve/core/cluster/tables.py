"""What the coordinator knows of its workers, as tables for operators."""

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping

from actorserve.core.messages import Column, Cordon, Peer, PowerReading
from actorserve.core.operations.tables import integer_column, number_column, text_column
from actorserve.core.placement.instance_view import InstanceView, NewInstance

Instance = NewInstance | InstanceView
LOCAL_HOST = "localhost"


def host_of(name: str) -> str:
    """The host of a process, which its name begins with. Names without a host belong to a server on one host."""
    host, slash, _ = name.rpartition("/")
    return host if slash else LOCAL_HOST


def state_of(instance: Instance) -> str:
    """In one word, what an instance does for operators. ``empty``: it was drained and has no request any more."""
    if isinstance(instance, NewInstance):
        return "starting"
    if instance.told_to_come_back:
        return "restarting"
    if instance.is_terminating:
        return "terminating"
    if instance.cordon is Cordon.EMPTYING:
        return "empty" if is_empty(instance) else "emptying"
    if instance.cordon is Cordon.CORDONED:
        return "cordoned"
    return "silent" if instance.is_stale else "open"


def role_of(view: InstanceView) -> str:
    """The instance's role, with a mark if it works in the mixed pool although that is not its role."""
    return f"{view.role.value}, mixed now" if view.is_drafted else view.role.value


def is_empty(view: InstanceView) -> bool:
    """Whether no request is there or on its way there, as far as the last report tells, which knows of the cordon."""
    report = view.report
    return not (
        view.in_flight
        or view.cordon_ordered
        or view.is_stale
        or report.num_running
        or report.num_waiting
        or report.num_migrating
    )


def worker_table(instances: Iterable[Instance]) -> tuple[Column, ...]:
    """A row for each worker: where it is, its state, its requests and its memory. Bytes of KV are the device's."""
    known = list(instances)
    views = [instance if isinstance(instance, InstanceView) else None for instance in known]
    return (
        text_column("worker", [instance.peer.name for instance in known]),
        text_column("host", [host_of(instance.peer.name) for instance in known]),
        text_column("state", [state_of(instance) for instance in known]),
        text_column("role", [role_of(view) if view else "" for view in views]),
        integer_column("running", [view.report.num_running if view else 0 for view in views]),
        integer_column("waiting", [view.report.num_waiting if view else 0 for view in views]),
        integer_column("in_flight", [len(view.in_flight) if view else 0 for view in views]),
        integer_column("swapped", [view.report.num_swapped if view else 0 for view in views]),
        integer_column("migrating", [view.report.num_migrating if view else 0 for view in views]),
        number_column("freeness", [_freeness(view) for view in views]),
        integer_column("kv_used_bytes", [view.report.kv_used_bytes if view else 0 for view in views]),
        integer_column("kv_total_bytes", [view.report.kv_total_bytes if view else 0 for view in views]),
        integer_column("preemptions", [view.report.num_preemptions if view else 0 for view in views]),
        integer_column("migrated", [view.report.num_migrated if view else 0 for view in views]),
        text_column("model", [instance.model.name for instance in known]),
        text_column("kind", [instance.kind for instance in known]),
        integer_column("incarnation", [instance.peer.incarnation for instance in known]),
    )


def top_table(instances: Iterable[Instance], reported_s: Mapping[Peer, float], now: float) -> tuple[Column, ...]:
    """A row for each worker that has reported, with what changes all the time. ``output_tokens`` counts since its
    start, and ``age_s`` is the age of its report, so that a reader of two tables knows the rate.
    """
    views = [instance for instance in instances if isinstance(instance, InstanceView)]
    reports = [view.report for view in views]
    powers = [report.power or PowerReading() for report in reports]
    return (
        text_column("worker", [view.peer.name for view in views]),
        text_column("state", [state_of(view) for view in views]),
        text_column("role", [role_of(view) for view in views]),
        number_column("freeness", [_freeness(view) for view in views]),
        integer_column("running", [report.num_running for report in reports]),
        integer_column("waiting", [report.num_waiting for report in reports]),
        integer_column("swapped", [report.num_swapped for report in reports]),
        integer_column("migrating", [report.num_migrating for report in reports]),
        integer_column("migrated", [report.num_migrated for report in reports]),
        integer_column("preemptions", [report.num_preemptions for report in reports]),
        integer_column("prompt_tokens_left", [report.pending_prompt_tokens for report in reports]),
        integer_column("kv_used_bytes", [report.kv_used_bytes for report in reports]),
        integer_column("kv_total_bytes", [report.kv_total_bytes for report in reports]),
        integer_column("output_tokens", [report.num_output_tokens for report in reports]),
        number_column("watts", [power.draw_watts for power in powers]),
        number_column("cap_watts", [power.cap_watts for power in powers]),
        number_column("age_s", [now - reported_s.get(view.peer, -math.inf) for view in views]),
    )


def host_table(instances: Collection[Instance], gateways: Iterable[Peer]) -> tuple[Column, ...]:
    """A row for each host that has a worker or a gateway, with sums over its workers."""
    workers: dict[str, list[Instance]] = defaultdict(list)
    num_gateways: dict[str, int] = defaultdict(int)
    for instance in instances:
        workers[host_of(instance.peer.name)].append(instance)
    for gateway in gateways:
        num_gateways[host_of(gateway.name)] += 1
    names = sorted({*workers, *num_gateways})
    views = {name: [instance for instance in workers[name] if isinstance(instance, InstanceView)] for name in names}
    return (
        text_column("host", names),
        integer_column("workers", [len(workers[name]) for name in names]),
        integer_column("open", [sum(view.is_healthy for view in views[name]) for name in names]),
        integer_column("gateways", [num_gateways[name] for name in names]),
        integer_column("running", [sum(view.report.num_running for view in views[name]) for name in names]),
        integer_column("waiting", [sum(view.report.num_waiting for view in views[name]) for name in names]),
        integer_column("kv_used_bytes", [sum(view.report.kv_used_bytes for view in views[name]) for name in names]),
        integer_column("kv_total_bytes", [sum(view.report.kv_total_bytes for view in views[name]) for name in names]),
    )


def _freeness(view: InstanceView | None) -> float:
    """How many tokens each of its requests can still get, as migration compares it; NaN if it is not known."""
    if view is None or view.must_empty:
        return math.nan
    report = view.report
    return view.free_bytes() / max(1, view.num_running) / report.bytes_per_block * report.tokens_per_block
