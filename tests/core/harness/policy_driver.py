"""Drives a scheduling policy by hand: requests, a profile of given times, and an engine with a batch of one."""

from collections.abc import Mapping

from actorserve.core.messages import Peer, RequestSpec, SamplingParams
from actorserve.core.request import Request
from actorserve.core.scheduling.policy import SchedulingPolicy
from actorserve.core.timing.profile import Curve, Link, Profile
from actorserve.core.timing.step_times import StepTimes


def step_times(prefill_s: Mapping[int, float], decode_s: float) -> StepTimes:
    """The times of an engine: ``prefill_s`` by tokens, and ``decode_s`` for each iteration of decodes."""
    link = Link(0.0, 1e9)
    return StepTimes(
        Profile(
            name="driven by hand",
            model="none",
            hardware="none",
            prefill=Curve(tuple(prefill_s), tuple(prefill_s.values())),
            prefill_context_s=0.0,
            decode=Curve((1,), (decode_s,)),
            decode_context=Curve((0,), (0.0,)),
            swap=link,
            transfer=link,
            kv_bytes_per_token=1,
        )
    )


def request(name: str, num_prompt: int, max_tokens: int = 2, priority: int = 0) -> Request:
    params = SamplingParams(seed=0, max_tokens=max_tokens)
    return Request(RequestSpec(name, (7,) * num_prompt, params, priority=priority), 1, Peer("gateway-0", 1))


def serve_one(policy: SchedulingPolicy, one: Request, service_s: float, now: float) -> None:
    """Count service of one request, and find its place anew."""
    for moving in policy.on_service([one], service_s, now):
        policy.move(moving)


def run_iteration(policy: SchedulingPolicy, times: StepTimes, one: Request, now: float, num_tokens: int = 0) -> float:
    """Run an iteration of ``one`` alone, with all its uncomputed tokens or ``num_tokens``; returns when it ends."""
    num_fed = num_tokens or one.num_uncomputed
    is_decode = one.num_uncomputed == 1
    service_s = times.decode_s(1, len(one.token_ids)) if is_decode else times.prefill_s(num_fed, one.num_computed)
    one.num_computed += num_fed
    if not one.num_uncomputed:
        one.append(9, None)
    serve_one(policy, one, service_s, now + service_s)
    if one.num_output == one.sampling.max_tokens:
        policy.remove(one)
    return now + service_s


def latencies_s(policy: SchedulingPolicy, times: StepTimes, requests: list[Request]) -> dict[str, float]:
    """When each of ``requests``, which all come at 0 s, ends on an engine with a batch of one."""
    for one in requests:
        policy.add(one, 0.0)
    now, ended = 0.0, {}
    while order := policy.order(now):
        now = run_iteration(policy, times, order[0], now)
        if order[0].num_output == order[0].sampling.max_tokens:
            ended[order[0].request_id] = now
    return ended


def names(policy: SchedulingPolicy, now: float) -> str:
    """The order, as one word of the requests' names."""
    return "".join(one.request_id for one in policy.order(now))
