"""The gateway process: the HTTP API and the gateway actor behind it, on one event loop."""

import asyncio
import gc
import sys
from contextlib import suppress
from pathlib import Path

import uvloop

from actorserve.actors.cluster_trust import open_trust
from actorserve.actors.gateway import GatewayActor
from actorserve.actors.node import open_node
from actorserve.core.gateway.state import GatewayState
from actorserve.core.messages import PROTOCOL_VERSION, Hello, Role
from actorserve.core_configs import gateway_config
from actorserve.errors import ActorserveError
from actorserve.http.access.api_keys import read_api_keys
from actorserve.http.access.open_requests import OpenRequests
from actorserve.http.access.tls import read_tls
from actorserve.http.access.tracing import open_tracing
from actorserve.http.app import create_app
from actorserve.http.chat.template import ChatTemplate
from actorserve.http.dashboard.host_requests import FOLDER as DASHBOARD, HostRequests
from actorserve.http.host_counts import COUNTS, OPEN_COUNTS, HostCounts
from actorserve.http.server import bind, serve
from actorserve.model_files.chat_template import read_chat_template
from actorserve.model_files.describe import describe
from actorserve.model_files.description import ModelDescription
from actorserve.model_files.tokenizer import load_tokenizer, tokenizer_digest
from actorserve.processes.child import Child
from actorserve.processes.signals import on_termination
from actorserve.settings import Settings

_ALLOCATIONS = 50_000
_GENERATIONS = (20, 20)  # how many searches of one generation precede one of the next
_SWITCH_S = 0.0005
"""How long a thread that reads a prompt may keep Python's lock while the event loop wants it. The loop takes the lock
again after each system call, so with Python's 5 ms a long prompt delayed each token by many times that."""
_WAITING_S = 60.0


class DrainError(ActorserveError):
    """The drain's time was too short for the requests in flight."""


def main(child: Child) -> None:
    """Serve clients until told to end; then finish the requests in flight, within the drain's time.

    Raises: DrainError when some requests were not finished; their clients were told.
    """
    uvloop.run(_run(child))


def _template(description: ModelDescription, settings: Settings) -> ChatTemplate | None:
    """The chosen chat template, or the model's own; None if the model has none, and chats are then refused.

    Raises: ModelError for a template that cannot be read, or does not compile.
    """
    chosen = settings.model.chat_template
    source = description.chat_template if chosen == "auto" else read_chat_template(Path(chosen))
    if source is None:
        return None
    return ChatTemplate(source, description.special_tokens, timeout_s=settings.http.template_timeout_s)


async def _run(child: Child) -> None:
    settings = child.settings
    http = settings.http
    keys = None if http.api_keys_file is None else read_api_keys(http.api_keys_file)
    tls = read_tls(http.tls_cert_file, http.tls_key_file)
    tracing = open_tracing(settings.log.trace_endpoint, child.name)
    child.status.loading("reading the tokenizer")
    description = describe(Path(settings.model.path), settings.model.load_format)
    tokenizer = load_tokenizer(description)
    config = gateway_config(settings)
    hello = Hello(PROTOCOL_VERSION, Role.GATEWAY, tokenizer_digest=tokenizer_digest(description))
    node = open_node(child.name, hello, settings.cluster, child.network, config, open_trust(child))
    # The kernel spreads connections evenly enough for equal shares.
    max_open_requests = -(-settings.http.max_open_requests // child.count)
    actor = GatewayActor(GatewayState(config), node, max_open_requests)
    template = _template(description, settings)
    ending = asyncio.Event()
    app = create_app(
        actor,
        tokenizer,
        template,
        description,
        settings.http,
        aliases=settings.model.aliases,
        tool_parser=settings.model.tool_parser,
        reasoning_parser=settings.model.reasoning_parser,
        api_keys=keys,
        counts=HostCounts(child.runtime_dir / COUNTS, child.file_name),
        open_requests=OpenRequests(HostCounts(child.runtime_dir / OPEN_COUNTS, child.file_name, keeps=False)),
        host_requests=HostRequests(child.runtime_dir / DASHBOARD, child.file_name),
        tracing=tracing,
        is_stopping=ending.is_set,
    )
    if keys is not None:
        child.reloads.add("API keys", keys.reload)
    if tls is not None:
        child.reloads.add("the TLS certificate", tls.reload)
    actor.on_reload_keys.append(child.reloads.run)
    child.reloads.start()
    drain_timeout_s, lame_duck_s = settings.cluster.drain_timeout_s, settings.http.lame_duck_s

    def end() -> None:
        child.status.stopping(lame_duck_s + drain_timeout_s)
        ending.set()

    on_termination(end)
    _collect_garbage_rarely()
    sys.setswitchinterval(_SWITCH_S)
    # A gateway that still loads must not get connections, because other gateways could serve them.
    listener = bind(settings.http.host, settings.http.port, shared=child.count > 1)

    async with asyncio.TaskGroup() as group:
        group.create_task(actor.run(), name="actor")
        reporting = group.create_task(_report_ready(child, actor), name="ready")
        await serve(
            app,
            listener,
            shutdown=lambda: _wait(ending),
            drain_timeout_s=drain_timeout_s,
            give_up=actor.give_up,
            tls=None if tls is None else tls.context,
            write_timeout_s=http.write_timeout_s,
            lame_duck_s=lame_duck_s,
        )
        reporting.cancel()
        actor.stop()
    if tracing is not None:
        tracing.close()
    if actor.num_given_up:
        raise DrainError(f"{actor.num_given_up} request(s) could not be finished in {drain_timeout_s:g} s")


def _collect_garbage_rarely() -> None:
    """Leave the tokenizer and the code out of the search for cycles, and search only after many allocations.

    With Python's defaults a busy gateway spends a fifth of its time searching, since every token makes objects.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_ALLOCATIONS, *_GENERATIONS)


async def _report_ready(child: Child, actor: GatewayActor) -> None:
    while not actor.available.is_set():
        child.status.loading("waiting for a worker")  # once more, because systemd gives up on a start that is silent
        with suppress(TimeoutError):
            await asyncio.wait_for(actor.available.wait(), _WAITING_S)
    child.status.ready()


async def _wait(event: asyncio.Event) -> None:
    await event.wait()
