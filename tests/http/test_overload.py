"""Overload as clients see it: real sessions and the coordinator's real core behind the HTTP API."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx

from actorserve.actors.gateway import GatewayActor
from actorserve.core.cluster.config import ClusterConfig
from actorserve.core.cluster.state import ClusterState
from actorserve.core.effects import Effect, Send
from actorserve.core.gateway.config import GatewayConfig
from actorserve.core.gateway.state import GatewayState
from actorserve.core.messages import LoadReport, Message, ModelInfo, Peer, PeerUp, Role, WorkerInfo
from actorserve.http.app import create_app
from actorserve.settings import HttpSettings
from tests.actors.cluster import lone_node
from tests.http.fakes import CONTEXT_TOKENS, DEADLINE_S, DESCRIPTION, MODEL, TOKENIZER, VOCAB_SIZE

GATEWAY, COORDINATOR, WORKER = Peer("gateway-0", 1), Peer("coordinator", 1), Peer("worker-0", 1)
QUESTION = {"model": MODEL, "prompt": "hello", "max_tokens": 3}


class LinkedSessions(GatewayState):
    """Sessions whose messages to the coordinator reach its core at once, without a network."""

    def __init__(self, coordinator: ClusterState) -> None:
        super().__init__(GatewayConfig(1.0, 30.0, 600.0))
        self.asked = asyncio.Event()
        self._coordinator = coordinator

    def handle(self, message: Message, now: float, sender: Peer | None = None) -> list[Effect]:
        effects: list[Effect] = []
        for effect in super().handle(message, now, sender):
            if not isinstance(effect, Send):
                effects.append(effect)
            elif effect.to == COORDINATOR:
                self.asked.set()
                for answer in self._coordinator.handle(effect.message, now, GATEWAY):
                    if isinstance(answer, Send) and answer.to == GATEWAY:
                        effects += self.handle(answer.message, now, COORDINATOR)
        return effects


class FullCluster:
    """A gateway and a coordinator without a network, on the test's clock. The only worker is full."""

    def __init__(self, max_waiting_requests: int) -> None:
        self.now = 0.0
        self.cluster = ClusterState(ClusterConfig(max_waiting_requests, 1.0))
        self.sessions = LinkedSessions(self.cluster)
        self.gateway = GatewayActor(self.sessions, lone_node(GATEWAY.name, lambda: self.now), 100)
        up = PeerUp(WORKER, Role.WORKER, WorkerInfo("k", ModelInfo(MODEL, VOCAB_SIZE, CONTEXT_TOKENS)))
        self.cluster.handle(up, 0.0)
        self.gateway.tell(up)
        self.gateway.tell(PeerUp(COORDINATOR, Role.COORDINATOR))
        self.gateway.step()
        self.cluster.handle(LoadReport(1, 1, 0, 1000, 1000, 1000, 10, 4, 0, kv_needed_bytes=1000), 0.0, WORKER)
        app = create_app(self.gateway, TOKENIZER, None, DESCRIPTION, HttpSettings())
        self.client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost/v1")

    @asynccontextmanager
    async def running(self) -> AsyncIterator[httpx.AsyncClient]:
        """Its client, while the gateway runs."""
        async with asyncio.TaskGroup() as group, self.client as client:
            steps = group.create_task(self._step_forever())
            try:
                yield client
            finally:
                steps.cancel()

    async def _step_forever(self) -> None:
        while True:
            self.gateway.step()
            await asyncio.sleep(0)

    async def wait_for(self, num_waiting: int) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while len(self.cluster.waiting) != num_waiting:
                self.sessions.asked.clear()
                await self.sessions.asked.wait()


def overloaded(response: httpx.Response) -> bool:
    error = response.json()["error"]
    return (response.status_code, error["type"], error["code"]) == (429, "rate_limit_error", "overloaded")


async def test_a_full_queue_answers_429_with_retry_after() -> None:
    """Above the queue's bound a request gets a 429 at once, with the time that the queue needs at its current rate."""
    full = FullCluster(max_waiting_requests=2)
    async with full.running() as client:
        waiting = [asyncio.create_task(client.post("completions", json=QUESTION)) for _ in range(2)]
        await full.wait_for(2)
        full.now = 8.4
        late = await client.post("completions", json=QUESTION)
        assert overloaded(late)
        assert late.headers["retry-after"] == "17"  # no request has left the queue in 8.4 s, and two wait
        streamed = await client.post("completions", json=QUESTION | {"stream": True})
        assert overloaded(streamed)
        assert streamed.headers["retry-after"] == "17"
        full.gateway.give_up()
        await asyncio.gather(*waiting)


async def test_a_request_without_a_worker_gets_429_with_retry_after() -> None:
    """A request that no worker accepts within no_instance_timeout_s ends with a 429, and leaves the queue."""
    full = FullCluster(max_waiting_requests=2)
    async with full.running() as client:
        waiting = asyncio.create_task(client.post("completions", json=QUESTION))
        await full.wait_for(1)
        full.now = 30.0
        response = await waiting
        assert overloaded(response)
        assert response.headers["retry-after"] == "30"
        assert not full.cluster.waiting
