"""Virtual usage and freeness: the definitions of Llumnix's Algorithm 1."""

from actorserve.core.kv.block_allocator import rows_for
from actorserve.core.messages import RequestSpec, SamplingParams
from actorserve.core.placement.freeness import freeness, virtual_usage_bytes
from actorserve.core.request import Request
from tests.core.harness.fleets import GATEWAY


def request(num_tokens: int, blocks: int, priority: int = 0) -> Request:
    spec = RequestSpec("r", (1,) * num_tokens, SamplingParams(0, 5), priority=priority)
    made = Request(spec, 1, GATEWAY)
    made.blocks = list(range(blocks))
    return made


def wanted(request: Request) -> int:
    """The demand in blocks of four tokens, none of which is cached."""
    return rows_for(len(request.token_ids), 4)


def test_virtual_usage_counts_held_blocks_and_the_head_of_the_line() -> None:
    """Running requests count what they hold; of the waiting ones only the first counts, with its demand."""
    order = [request(8, 2), request(9, 0), request(100, 0), request(4, 1)]
    assert virtual_usage_bytes(order, 3, wanted, 10, {}) == 3 * 10 + 3 * 10


def test_headroom_is_shared_by_the_requests_of_a_priority() -> None:
    """Each running request of a priority adds headroom over their number: in sum, the headroom once."""
    order = [request(4, 1, priority=1), request(4, 1, priority=1), request(4, 1)]
    assert virtual_usage_bytes(order, 3, wanted, 10, {1: 500}) == 30 + 500


def test_a_waiting_request_has_no_headroom() -> None:
    """Headroom is for running requests: a waiting one counts at most its demand."""
    assert virtual_usage_bytes([request(4, 1), request(4, 0, priority=1)], 1, wanted, 10, {1: 500}) == 10 + 10


def test_freeness_is_what_is_left_a_running_request() -> None:
    """F = (M - V) / max(1, B), negative when demand exceeds memory, minus infinity when terminating."""
    assert freeness(1000, 400, 3) == 200
    assert freeness(1000, 400, 0) == 600
    assert freeness(1000, 1400, 2) == -200
    assert freeness(1000, 0, 0, terminating=True) == float("-inf")
