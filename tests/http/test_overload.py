"""Overload as clients see it: real sessions and the coordinator's real core behind the HTTP API."""

import asyncio
from collections import deque

import httpx

from actorserve.core.cluster.config import ClusterConfig
from actorserve.core.cluster.state import ClusterState
from actorserve.core.effects import Send
from actorserve.core.gateway.config import GatewayConfig
from actorserve.core.gateway.state import GatewayState
from actorserve.core.messages import LoadReport, Message, ModelInfo, Peer, PeerUp, Role, Tick, WorkerInfo
from actorserve.http.app import create_app
from actorserve.http.sessions import SessionService
from actorserve.settings import HttpSettings
from tests.http.fakes import CONTEXT_TOKENS, DEADLINE_S, DESCRIPTION, MODEL, TOKENIZER, VOCAB_SIZE

GATEWAY, COORDINATOR, WORKER = Peer("gateway-0", 1), Peer("coordinator", 1), Peer("worker-0", 1)
QUESTION = {"model": MODEL, "prompt": "hello", "max_tokens": 3}


class FullCluster:
    """A gateway and a coordinator without a network, on the test's clock. The only worker is full."""

    def __init__(self, max_waiting_requests: int) -> None:
        self.now = 0.0
        self.asked = asyncio.Event()
        self.sessions = GatewayState(GatewayConfig(1.0, 30.0, 600.0))
        self.cluster = ClusterState(ClusterConfig(max_waiting_requests, 1.0))
        self.service = SessionService(self.sessions, 100)
        self.service.attach(self.tell_gateway, lambda: 0)
        up = PeerUp(WORKER, Role.WORKER, WorkerInfo("k", ModelInfo(MODEL, VOCAB_SIZE, CONTEXT_TOKENS)))
        self.cluster.handle(up, 0.0)
        self.tell_gateway(up)
        self.tell_gateway(PeerUp(COORDINATOR, Role.COORDINATOR))
        self.cluster.handle(LoadReport(1, 1, 0, 1000, 1000, 1000, 10, 4, 0, kv_needed_bytes=1000), 0.0, WORKER)
        app = create_app(self.service, TOKENIZER, None, DESCRIPTION, HttpSettings())
        self.client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway/v1")

    def tell_gateway(self, message: Message, sender: Peer | None = None) -> None:
        answers: deque[Message] = deque()
        for effect in self.sessions.handle(message, self.now, sender):
            if not isinstance(effect, Send):
                self.service.perform(effect)
            elif effect.to == COORDINATOR:
                self.asked.set()
                back = self.cluster.handle(effect.message, self.now, GATEWAY)
                answers += (answer.message for answer in back if isinstance(answer, Send) and answer.to == GATEWAY)
        for answer in answers:
            self.tell_gateway(answer, COORDINATOR)

    async def wait_for(self, num_waiting: int) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while len(self.cluster.waiting) != num_waiting:
                self.asked.clear()
                await self.asked.wait()


def overloaded(response: httpx.Response) -> bool:
    error = response.json()["error"]
    return (response.status_code, error["type"], error["code"]) == (429, "rate_limit_error", "overloaded")


async def test_a_full_queue_answers_429_with_retry_after() -> None:
    """Above the queue's bound a request gets a 429 at once, with the time that the queue needs at its current rate."""
    full = FullCluster(max_waiting_requests=2)
    async with full.client as client:
        waiting = [asyncio.create_task(client.post("completions", json=QUESTION)) for _ in range(2)]
        await full.wait_for(2)
        full.now = 8.4
        late = await client.post("completions", json=QUESTION)
        assert overloaded(late)
        assert late.headers["retry-after"] == "17"  # no request has left the queue in 8.4 s, and two wait
        streamed = await client.post("completions", json=QUESTION | {"stream": True})
        assert overloaded(streamed)
        assert streamed.headers["retry-after"] == "17"
        full.service.give_up()
        await asyncio.gather(*waiting)


async def test_a_request_without_a_worker_gets_429_with_retry_after() -> None:
    """A request that no worker accepts within no_instance_timeout_s ends with a 429, and leaves the queue."""
    full = FullCluster(max_waiting_requests=2)
    async with full.client as client:
        waiting = asyncio.create_task(client.post("completions", json=QUESTION))
        await full.wait_for(1)
        full.now = 30.0
        full.tell_gateway(Tick())
        response = await waiting
        assert overloaded(response)
        assert response.headers["retry-after"] == "30"
        assert not full.cluster.waiting
