"""The dispatch rules that Llumnix compares its own with (section 6.1).

Neither counts prefixes, and neither moves a request afterwards. To behave like the baselines of the paper they must
dispatch at once (``ClusterConfig.late_binding`` off), and so must Llumnix's own rule when it is compared with them.
"""

from actorserve.core.placement.instance_view import InstanceView


class RoundRobin:
    """The instance whose last placement is the oldest."""

    counts_prefixes = False
    prefers_room = False

    def score(self, view: InstanceView, num_saved_tokens: int = 0) -> float:
        return -float(view.last_turn)


class LeastLoaded:
    """INFaaS++: the instance with the least memory load.

    The load counts the KV that running and waiting requests need, and that of placements in flight. It is a share of
    the instance's memory, so that instances of different sizes compare.
    """

    counts_prefixes = False
    prefers_room = False

    def score(self, view: InstanceView, num_saved_tokens: int = 0) -> float:
        report = view.report
        in_flight_bytes = view.num_blocks_in_flight * report.bytes_per_block
        needed_bytes = report.kv_needed_bytes + report.kv_wanted_bytes + in_flight_bytes
        return -needed_bytes / max(1, report.kv_total_bytes)
