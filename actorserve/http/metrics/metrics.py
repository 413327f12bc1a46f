"""``/metrics``: the names that dashboards for vLLM read, on a registry of our own.

Load comes from the instances' latest reports (``http.metrics.load_metrics``), with one ``engine`` label per instance.
The tokens, latencies and endings that clients see are measured here (``http.metrics.request_meter``), and summed over
the host's gateways. In these metrics a request is one choice of an answer, and the ``engine`` is ``gateway``, because a
request may change its worker. Latencies include the wait for a slow client.

The gateways of one host all tell the host's sums, so a host is read once. The instances are told by the gateways of one
host alone, so a sum over all hosts counts everything once.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final

from prometheus_client import CollectorRegistry, generate_latest

from actorserve.core.messages import RequestSpec
from actorserve.http.host_counts import HostCounts
from actorserve.http.metrics.host_metrics import HostMetrics
from actorserve.http.metrics.load_metrics import LoadMetrics
from actorserve.http.metrics.names import KEY_REQUESTS, RESTARTS
from actorserve.http.metrics.request_meter import RequestMeter, RequestMetrics
from actorserve.http.service import Service

_SHARE_S: Final = 1.0
_UNPLACED: Final = ("unplaced",)


class Metrics:
    """All metrics of ``/metrics``. ``clock`` gives seconds that never decrease. ``counts`` are shared with the host's
    other gateways.
    """

    def __init__(self, service: Service, clock: Callable[[], float], counts: HostCounts) -> None:
        self._service = service
        self._counts = counts
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(LoadMetrics(service, lambda: counts.totals().get(_UNPLACED, 0.0)))
        host = HostMetrics(counts)
        self.registry.register(host)
        self._requests = RequestMetrics(host, clock)
        self._unknown_fields = host.counter(
            "actorserve_unknown_fields", "Fields of requests that this server does not know and has ignored."
        ).labels()
        self._answers = host.counter(
            "http_requests",
            "Requests that were answered, also those that were refused.",
            ("handler", "method", "status"),
        )
        self._statuses = host.counter("actorserve_http_responses", "Answers by their HTTP status.", ("status",))
        self._key_requests = host.counter(KEY_REQUESTS, "Requests of an API key.", ("key",))
        self._key_refusals = host.counter(
            "actorserve_key_refusals", "Requests of an API key beyond one of its limits.", ("key", "limit")
        )
        host.counter(RESTARTS, "Processes of this host that ended unexpectedly and were started again.", ("process",))
        for name in service.counters():
            host.counter(f"actorserve_{name}", f"{name.replace('_', ' ')}.")
        self._service_cells = {name: counts.cell((f"actorserve_{name}",)) for name in service.counters()}
        # What this process's predecessor has counted.
        self._counted_before = {name: counts.values[cell] for name, cell in self._service_cells.items()}
        self._unplaced_cell = counts.cell(_UNPLACED)

    def begin(self, spec: RequestSpec) -> RequestMeter:
        """Begin to measure one request, which has just arrived."""
        model = self._service.model
        return self._requests.begin(model.name if model is not None else "", spec)

    def count_unknown_fields(self, num_fields: int) -> None:
        """A request had fields that were ignored."""
        self._unknown_fields.inc(num_fields)

    def count_answer(self, route: str, method: str, status: int) -> None:
        """An answer has begun; the values are those of ``AnswerCounts``."""
        self._answers.labels(route, method, f"{status // 100}xx").inc()
        self._statuses.labels(str(status)).inc()

    def count_key_request(self, key: str) -> None:
        """A request came with this API key."""
        self._key_requests.labels(key).inc()

    def count_key_refusal(self, key: str, limit: str) -> None:
        """A request with this API key was beyond ``limit``."""
        self._key_refusals.labels(key, limit).inc()

    def render(self) -> bytes:
        """The page, in Prometheus's text format."""
        self.share()
        return generate_latest(self.registry)

    def share(self) -> None:
        """Write what this gateway's service counts where the host's other gateways find it."""
        for name, count in self._service.counters().items():
            self._counts.values[self._service_cells[name]] = self._counted_before[name] + count
        self._counts.values[self._unplaced_cell] = self._service.num_unplaced

    @asynccontextmanager
    async def sharing(self, _: object = None) -> AsyncIterator[None]:
        """While this context lasts, the host's other gateways know this one's counts as of the last second."""
        async with asyncio.TaskGroup() as group:
            task = group.create_task(self._share_often(), name="shared counts")
            yield
            task.cancel()

    async def _share_often(self) -> None:
        while True:
            self.share()
            await asyncio.sleep(_SHARE_S)
