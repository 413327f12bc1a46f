"""One moment of the cluster as the page gets it: columns of plain values, in JSON."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from actorserve.core.gateway.shown import Shown, ShownInstance, ShownRequest
from actorserve.core.messages import LoadReport

MAX_REQUESTS: Final = 1000
"""As many requests are shown as marks. Tiles tell the numbers of all."""

_OF_REPORT: Final[Mapping[str, Callable[[LoadReport], object]]] = {
    "kv_used_bytes": lambda report: report.kv_used_bytes,
    "kv_total_bytes": lambda report: report.kv_total_bytes,
    "host_used_bytes": lambda report: report.host_used_bytes,
    "host_total_bytes": lambda report: report.host_total_bytes,
    "tokens_per_byte": lambda report: report.tokens_per_block / report.bytes_per_block,
    "in_batch": lambda report: report.num_in_batch,
    "running": lambda report: report.num_running,
    "waiting": lambda report: report.num_waiting,
    "swapped": lambda report: report.num_swapped,
    "migrating": lambda report: report.num_migrating,
    "migrated": lambda report: report.num_migrated,
    "preemptions": lambda report: report.num_preemptions,
    "draw_watts": lambda report: None if report.power is None else report.power.draw_watts,
    "cap_watts": lambda report: None if report.power is None else report.power.cap_watts,
    "levels": lambda report: report.num_by_level,
}


def snapshot(
    shown: Shown, others: Sequence[ShownRequest], num_requests: int, rates: Mapping[str, float]
) -> dict[str, Any]:
    """What is ``shown`` by this gateway, with the requests that the host's ``others`` own, ``num_requests`` in all.
    ``rates`` are tokens/s by instance.
    """
    instances = shown.instances
    requests = [*shown.requests, *others][:MAX_REQUESTS]
    return {
        "model": instances[0].model if instances else "",
        "reports_age_s": round(shown.now_s - shown.reports_at_s, 2) if any(each.report for each in instances) else None,
        "num_requests": num_requests,
        "instances": {
            "name": [instance.name for instance in instances],
            "host": [instance.host for instance in instances],
            "state": [instance.state for instance in instances],
            "kind": [instance.kind for instance in instances],
            "tokens_per_s": [rates.get(instance.name, 0.0) for instance in instances],
            **{name: [_value(instance, read) for instance in instances] for name, read in _OF_REPORT.items()},
        },
        "requests": {
            "id": [request.request_id for request in requests],
            "worker": [request.worker for request in requests],
            "state": [request.state for request in requests],
            "prompt_tokens": [request.num_prompt_tokens for request in requests],
            "output_tokens": [request.num_output_tokens for request in requests],
            "max_tokens": [request.max_tokens for request in requests],
            "age_s": [round(request.age_s, 1) for request in requests],
            "priority": [request.priority for request in requests],
            "client": [request.client for request in requests],
            "moves": [request.num_moves for request in requests],
        },
    }


def _value(instance: ShownInstance, read: Callable[[LoadReport], object]) -> object:
    """None for an instance that has not reported."""
    return None if instance.report is None else read(instance.report)
