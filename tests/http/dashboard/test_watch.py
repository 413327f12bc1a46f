"""The page's stream: snapshots of the cluster and the history, shared by all pages. It never waits for a slow page."""

import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

from actorserve.core.gateway.shown import Shown, ShownInstance, ShownRequest
from actorserve.http.dashboard.host_requests import LEASE_S, HostRequests
from actorserve.http.dashboard.snapshot import MAX_REQUESTS
from actorserve.http.dashboard.watch import INTERVAL_S, Watch
from actorserve.http.host_counts import HostCounts
from tests.http.fakes import DEADLINE_S, ScriptedService, load


def request(name: str, worker: str, num_moves: int = 0) -> ShownRequest:
    return ShownRequest(name, worker, "running" if worker else "waiting", 10, 3, 20, 1.25, 0, "team", num_moves)


def shown(*requests: ShownRequest, now_s: float = 7.5, num_tokens: int = 0) -> Shown:
    report = replace(load(3), num_output_tokens=num_tokens, num_by_level=(2, 0, 1))
    instances = (
        ShownInstance("a/worker-0", 1, "a", "open", "tiny", "kind", report),
        ShownInstance("b/worker-0", 1, "b", "silent", "tiny", "kind", None),
    )
    return Shown(now_s, instances, now_s - 0.5, requests, len(requests))


def watch_of(service: ScriptedService, host_requests: HostRequests | None = None) -> Watch:
    return Watch(service, HostCounts(), host_requests or HostRequests(), lambda: False)


async def next_of(events: AsyncIterator[bytes], name: str) -> dict[str, Any]:
    """The data of the next event of this name."""
    async with asyncio.timeout(DEADLINE_S):
        async for event in events:
            lines = event.decode().split("\n")
            assert lines[2:] == ["", ""], "an event ends with a blank line"
            if lines[0] == f"event: {name}":
                data: dict[str, Any] = json.loads(lines[1].removeprefix("data: "))
                return data
    raise AssertionError("the stream has ended")


async def test_a_page_sees_instances_and_requests() -> None:
    """A snapshot has a row for each instance, also for a silent one, and for each request with its worker."""
    service = ScriptedService()
    service.now_shown = shown(request("r1", "a/worker-0"), request("r2", ""))
    watch = watch_of(service)
    async with watch.running(), aclosing(watch.events()) as events:
        seen = await next_of(events, "snapshot")
        assert (seen["model"], seen["num_requests"], seen["reports_age_s"]) == ("tiny", 2, 0.5)
        instances = seen["instances"]
        assert instances["name"] == ["a/worker-0", "b/worker-0"]
        assert instances["host"] == ["a", "b"]
        assert instances["state"] == ["open", "silent"]
        assert instances["kv_used_bytes"] == [25, None]
        assert instances["levels"] == [[2, 0, 1], None]
        assert (instances["draw_watts"], instances["cap_watts"]) == ([345.5, None], [350.0, None])
        assert {len(column) for column in instances.values()} == {2}
        assert seen["requests"]["id"] == ["r1", "r2"]
        assert seen["requests"]["worker"] == ["a/worker-0", ""]
        assert {len(column) for column in seen["requests"].values()} == {2}
        service.now_shown = shown(request("r1", "b/worker-0", num_moves=1))
        while (seen := await next_of(events, "snapshot"))["num_requests"] != 1:
            pass
        assert (seen["requests"]["worker"], seen["requests"]["moves"]) == (["b/worker-0"], [1])


async def test_a_new_page_gets_the_history_and_then_what_is_new() -> None:
    """The first points are all that there are, and each later one comes once; rates follow from two reports."""
    service = ScriptedService()
    service.now_shown = shown(now_s=1.0)
    watch = watch_of(service)
    async with watch.running(), aclosing(watch.events()) as events:
        points = await next_of(events, "points")
        assert points["every_s"] == 2.0
        assert points["number"] == [1]
        assert points["tokens_per_s"] == [0.0]
        assert points["ttft_p50_s"] == [None]
        service.now_shown = shown(request("r", ""), now_s=3.0, num_tokens=100)
        points = await next_of(events, "points")
        assert (points["number"], points["tokens_per_s"]) == ([2], [50.0])
        assert (points["num_running"], points["num_waiting"]) == ([3], [5])
        async with aclosing(watch.events()) as later:
            assert (await next_of(later, "points"))["number"] == [1, 2]
        assert (await next_of(events, "snapshot"))["instances"]["tokens_per_s"] == [50.0, 0.0]


async def test_all_pages_share_a_snapshot_and_a_slow_one_skips() -> None:
    """A snapshot is made once for all pages; a page that has not read for a while gets the newest one next."""
    made = 0

    class Counting(ScriptedService):
        def shown(self, most_requests: int) -> Shown:
            nonlocal made
            made += 1
            return shown(now_s=float(made))

    watch = watch_of(Counting())
    async with watch.running(), aclosing(watch.events()) as slow:
        await next_of(slow, "snapshot")
        pages = [watch.events() for _ in range(10)]
        made = 0
        for _ in range(4):
            seen = [json.dumps(await next_of(page, "snapshot")) for page in pages]
            assert len(set(seen)) == 1
        assert watch.num_pages == 11
        assert made <= 4 + 2, "one for each snapshot, and those of the history"
        newest = await next_of(slow, "snapshot")
        assert json.dumps(newest) == seen[0]
        for page in pages:
            await page.aclose()
        assert watch.num_pages == 1


async def test_nothing_is_made_while_nobody_watches() -> None:
    """Without a page there are only the history's points."""
    made = 0

    class Counting(ScriptedService):
        def shown(self, most_requests: int) -> Shown:
            nonlocal made
            made += 1
            return shown(now_s=float(made))

    watch = watch_of(Counting())
    async with watch.running():
        await asyncio.sleep(3.5 * INTERVAL_S)
    assert made == 1


async def test_streams_end_when_the_server_stops() -> None:
    """Open pages do not hold up the end of a gateway."""
    is_stopping = False
    watch = Watch(ScriptedService(), HostCounts(), HostRequests(), lambda: is_stopping)
    async with watch.running(), asyncio.timeout(DEADLINE_S):
        events = watch.events()
        await next_of(events, "snapshot")
        is_stopping = True
        async for _ in events:
            pass
    assert watch.num_pages == 0


async def test_a_page_shows_the_requests_of_all_gateways_of_its_host(tmp_path: Path) -> None:
    """A gateway without a page tells its requests while another one has a page, and the page has those of both."""
    services = [ScriptedService(), ScriptedService()]
    watches = [watch_of(service, HostRequests(tmp_path, f"gateway-{index}")) for index, service in enumerate(services)]
    services[0].now_shown = shown(request("r1", "a/worker-0"))
    services[1].now_shown = shown(request("r2", "b/worker-0"), request("r3", ""))
    async with watches[0].running(), watches[1].running():
        await asyncio.sleep(2 * INTERVAL_S)
        assert os.listdir(tmp_path) == []
        async with aclosing(watches[0].events()) as events:
            while (seen := await next_of(events, "snapshot"))["num_requests"] != 3:
                pass
    assert seen["requests"]["id"] == ["r1", "r2", "r3"]


def test_what_a_dead_gateway_told_is_forgotten(tmp_path: Path) -> None:
    """A file that was not renewed within the lease does not count, and neither does the wish to watch."""
    now_s = 1e9

    def clock() -> float:
        return now_s

    here, there = (HostRequests(tmp_path, name, clock) for name in ("gateway-0", "gateway-1"))
    assert not there.is_watched()
    here.watch()
    assert there.is_watched()
    there.tell([request("r", "a/worker-0")], 5)
    assert here.others() == ([request("r", "a/worker-0")], 5)
    assert there.others() == ([], 0)
    now_s += LEASE_S
    assert not there.is_watched()
    assert here.others() == ([], 0)


async def test_at_most_so_many_requests_are_marks(tmp_path: Path) -> None:
    """The number of all is told, whatever the number of marks."""
    service = ScriptedService()
    listed = tuple(request(f"r{index}", "a/worker-0") for index in range(MAX_REQUESTS))
    service.now_shown = shown(*listed)._replace(num_requests=MAX_REQUESTS + 1)
    other = HostRequests(tmp_path, "gateway-1")
    other.tell(listed[:7], 7)
    watch = watch_of(service, HostRequests(tmp_path, "gateway-0"))
    async with watch.running(), aclosing(watch.events()) as events:
        seen = await next_of(events, "snapshot")
    assert (len(seen["requests"]["id"]), seen["num_requests"]) == (MAX_REQUESTS, MAX_REQUESTS + 8)
