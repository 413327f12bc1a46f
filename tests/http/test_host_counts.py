"""Numbers that the gateways of a host count together: nothing is lost when a gateway dies."""

import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from actorserve.http.access.open_requests import OpenRequests
from actorserve.http.host_counts import HostCounts
from actorserve.http.metrics.host_metrics import HostMetrics


def add(counts: HostCounts, name: str, number: float) -> None:
    counts.values[counts.cell((name, "x"))] += number


def test_every_process_tells_the_sums(tmp_path: Path) -> None:
    """The sums hold what all processes have counted, in whatever order they first used the names."""
    one, two = HostCounts(tmp_path, "gateway-0"), HostCounts(tmp_path, "gateway-1")
    add(one, "a", 1.5)
    add(two, "b", 2.0)
    add(two, "a", 3.0)
    for counts in (one, two):
        assert counts.totals() == {("a", "x"): 4.5, ("b", "x"): 2.0}


def test_a_successor_continues_the_numbers(tmp_path: Path) -> None:
    """What a process counted before it was killed stays in the sums, and its successor adds to it."""

    def count_and_die() -> None:
        counts = HostCounts(tmp_path, "gateway-0")
        add(counts, "a", 5.0)
        os.kill(os.getpid(), signal.SIGKILL)

    process = multiprocessing.get_context("fork").Process(target=count_and_die)
    process.start()
    process.join(20)
    assert process.exitcode == -signal.SIGKILL
    with (tmp_path / "gateway-0.names").open("a", encoding="utf-8") as names:
        names.write('["unfinish')  # as if the process had died in the middle of a line
    successor = HostCounts(tmp_path, "gateway-0")
    add(successor, "a", 1.0)
    add(successor, "b", 7.0)
    assert HostCounts(tmp_path, "gateway-1").totals() == {("a", "x"): 6.0, ("b", "x"): 7.0}


def test_open_requests_are_limited_over_all_gateways(tmp_path: Path) -> None:
    """A key's requests at all gateways count against its limit, and an ended request makes room."""
    one, two = (OpenRequests(HostCounts(tmp_path, name, keeps=False)) for name in ("gateway-0", "gateway-1"))
    assert one.begin("team", 2)
    assert two.begin("team", 2)
    assert not one.begin("team", 2)
    assert not two.begin("team", 2)
    assert two.begin("other team", 2)
    two.end("team")
    assert one.begin("team", 2)


def test_a_dead_gateways_requests_are_given_back(tmp_path: Path) -> None:
    """The successor of a gateway that was killed has no open requests, so its key may begin new ones."""
    one, two = (OpenRequests(HostCounts(tmp_path, name, keeps=False)) for name in ("gateway-0", "gateway-1"))
    assert one.begin("team", 1)
    assert not two.begin("team", 1)
    OpenRequests(HostCounts(tmp_path, "gateway-0", keeps=False))
    assert two.begin("team", 1)


def test_a_stopped_gateway_stops_no_other(tmp_path: Path) -> None:
    """Requests begin at a gateway, whatever another one was doing when it was stopped."""

    def begin_for_ever() -> None:
        requests = OpenRequests(HostCounts(tmp_path, "gateway-0", keeps=False))
        while True:
            requests.begin("team", 1000)
            requests.end("team")

    other = multiprocessing.get_context("fork").Process(target=begin_for_ever)
    other.start()
    assert other.pid is not None
    try:
        requests = OpenRequests(HostCounts(tmp_path, "gateway-1", keeps=False))
        for _ in range(20):
            time.sleep(0.01)
            os.kill(other.pid, signal.SIGSTOP)
            beginning = threading.Thread(target=requests.begin, args=("team", 1000), daemon=True)
            beginning.start()
            beginning.join(2)
            assert not beginning.is_alive()
            os.kill(other.pid, signal.SIGCONT)
    finally:
        other.kill()
        other.join()


def test_counters_and_histograms_are_summed(tmp_path: Path) -> None:
    """A gateway shows counters and cumulative histograms of all gateways, as Prometheus's own library would."""
    shown = []
    for name in ("gateway-0", "gateway-1"):
        metrics = HostMetrics(HostCounts(tmp_path, name))
        metrics.counter("tokens", "Tokens.", ("model",)).labels("m").inc(3)
        histogram = metrics.histogram("wait_seconds", "Wait.", ("model",), (0.1, 1)).labels("m")
        for value in (0.05, 0.1, 0.5, 7.0):
            histogram.observe(value)
        registry = CollectorRegistry()
        registry.register(metrics)
        shown.append(registry)
    for registry in shown:
        families = text_string_to_metric_families(generate_latest(registry).decode())
        samples = {
            (sample.name, sample.labels.get("le")): sample.value for family in families for sample in family.samples
        }
        assert samples == {
            ("tokens_total", None): 6.0,
            ("wait_seconds_bucket", "0.1"): 4.0,
            ("wait_seconds_bucket", "1.0"): 6.0,
            ("wait_seconds_bucket", "+Inf"): 8.0,
            ("wait_seconds_count", None): 8.0,
            ("wait_seconds_sum", None): 2 * (0.05 + 0.1 + 0.5 + 7.0),
        }


def test_a_restart_does_not_disturb_the_others(tmp_path: Path) -> None:
    """While a process begins again, and has already removed its files, the others still tell their sums."""
    ours, other = HostCounts(tmp_path, "a"), HostCounts(tmp_path, "b", keeps=False)
    ours.values[ours.cell(("x",))] += 2.0
    other.values[other.cell(("x",))] += 3.0
    (tmp_path / "b.values").unlink()
    assert ours.totals() == {("x",): 2.0}
