"""What else requests can be dispatched by: the baselines that Llumnix compares with (section 6.1), behind one protocol.

An ``Order`` gives each instance a number, and a request goes to the highest of those that admit it. None of these knows
of prefixes, nor moves a request later on. To be what the paper compares with they dispatch at once
(``ClusterConfig.late_binding`` off), and so does its own arm.
"""

from typing import Final

from actorserve.core.placement.fleet import InstanceView, Order, by_freeness


def by_turn(view: InstanceView) -> float:
    """Round robin: to the one that has been sent nothing for longest."""
    return -float(view.last_turn)


def by_load(view: InstanceView) -> float:
    """INFaaS++: to the least memory load, the demand of all who wait there and of what is under way included.

    The load is what they need over what there is, so instances of different sizes compare.
    """
    report = view.report
    if report is None:
        return float("-inf")
    under_way_bytes = view.num_blocks_in_flight * report.bytes_per_block
    needed_bytes = report.kv_needed_bytes + report.kv_wanted_bytes + under_way_bytes
    return -needed_bytes / max(1, report.kv_total_bytes)


ORDERS: Final[dict[str, Order]] = {
    "freeness": by_freeness,
    "least_loaded": by_load,
    "round_robin": by_turn,
}
"""By the name that settings give them."""
