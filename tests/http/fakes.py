"""A service whose tokens a test gives, and a tiny but real tokenizer, chat template and description for it."""

import asyncio
import math
import socket
import ssl
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import httpx
from starlette.types import ASGIApp
from tokenizers import AddedToken, Tokenizer as Backend, decoders, models, pre_tokenizers

from actorserve.core.effects import Deliver, End
from actorserve.core.gateway.shown import Shown
from actorserve.core.messages import (
    FinishReason,
    LoadReport,
    ModelInfo,
    PowerReading,
    RefusalReason,
    RequestSpec,
    TokenLogprobs,
)
from actorserve.http.access.api_keys import ApiKeys
from actorserve.http.app import create_app
from actorserve.http.chat.template import ChatTemplate
from actorserve.http.server import bind, serve
from actorserve.http.stream import AnswerStream
from actorserve.model_files.description import DecoderConfig, ModelDescription
from actorserve.model_files.pieces import ByteLevelPieces
from actorserve.model_files.tokenizer import Tokenizer
from actorserve.settings import HttpSettings

MODEL = "tiny"
CONTEXT_TOKENS = 200
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
DEADLINE_S = 20.0


def _build_tokenizer() -> Tokenizer:
    """Its tokens are all bytes, a few words, and four control tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["he", "ll", "hell", "hello"]
    vocab = {token: index for index, token in enumerate([*alphabet, *words])}
    backend = Backend(models.BPE(vocab=vocab, merges=[("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(
        [AddedToken(f"<|{name}|>", special=True) for name in ("end", "system", "user", "assistant")]
    )
    return Tokenizer(backend, ByteLevelPieces())


TOKENIZER = _build_tokenizer()
VOCAB_SIZE = TOKENIZER.vocab_size
END = TOKENIZER.encode("<|end|>")[0]
DESCRIPTION = ModelDescription(
    name=MODEL,
    path=Path("tiny"),
    format="hf",
    config=DecoderConfig(
        architecture="llama",
        vocab_size=VOCAB_SIZE,
        hidden_size=8,
        intermediate_size=8,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=8,
        norm_eps=1e-5,
        rope_theta=1e4,
        rotary_dim=8,
        windows=(0,),
        query_scale=8**-0.5,
        max_position_embeddings=CONTEXT_TOKENS,
        tie_word_embeddings=True,
    ),
    weight_files=(),
    eos_token_ids=(END,),
    bos_token_id=None,
    chat_template=TEMPLATE,
    special_tokens={"eos_token": "<|end|>"},
)


def delivered(text: str, logprob: float | None = None) -> Deliver:
    """``text`` as the tokens of one Deliver. With ``logprob``, all have it, and one alternative."""
    token_ids = tuple(TOKENIZER.encode(text))
    if logprob is None:
        return deliver(token_ids)
    return deliver(token_ids, tuple(TokenLogprobs(logprob, (i, END), (logprob, -7.0)) for i in token_ids))


def deliver(token_ids: Iterable[int], logprobs: tuple[TokenLogprobs, ...] = ()) -> Deliver:
    """A Deliver of these tokens, for any request."""
    return Deliver("", tuple(token_ids), logprobs)


def end(reason: FinishReason, refusal: RefusalReason | None = None, retry_after_s: float = 0.0) -> End:
    """An End, for any request."""
    return End("", reason, refusal, retry_after_s)


def one_by_one(text: str, reason: FinishReason = FinishReason.LENGTH) -> list[Deliver | End]:
    """``text``, one token per Deliver, and then an End."""
    return [*(deliver((token_id,)) for token_id in TOKENIZER.encode(text)), end(reason)]


def load(num_running: int = 1) -> LoadReport:
    return LoadReport(
        sequence=1,
        num_running=num_running + 2,
        num_in_batch=num_running,
        num_waiting=2,
        kv_total_bytes=100,
        kv_used_bytes=25,
        virtual_usage_bytes=50,
        bytes_per_block=1,
        tokens_per_block=16,
        num_preemptions=3,
        num_tokens_looked_up=50,
        num_tokens_found=20,
        host_total_bytes=200,
        host_used_bytes=150,
        num_swapped=5,
        num_swap_outs=7,
        swapped_bytes=1100,
        swap_blocked_s=0.25,
        num_migrating=6,
        num_migrated=8,
        num_migrations_failed=9,
        migrated_bytes=1200,
        checkpointed_bytes=1300,
        power=PowerReading("GPU-0", 345.5, cap_watts=350.0),
    )


class ScriptedRequest:
    """A request that delivers the effects that a test gives, one per turn of the event loop like a real engine."""

    def __init__(self, spec: RequestSpec, stream: AnswerStream) -> None:
        self.spec = spec
        self.released = asyncio.Event()
        self.was_complete = False  # when it was released
        self._stream = stream
        self._effects: deque[Deliver | End] = deque()
        self._num_delivered = 0

    @property
    def num_taken(self) -> int:
        """How many effects the answer has taken, if this is its only request."""
        return self._num_delivered - len(self._stream)

    def feed(self, effects: Iterable[Deliver | End]) -> None:
        """Deliver these effects after the earlier ones, with this request's id."""
        is_delivering = bool(self._effects)
        self._effects.extend(replace(effect, request_id=self.spec.request_id) for effect in effects)
        if not is_delivering:
            self._deliver()

    def feed_at_once(self, effects: Iterable[Deliver | End]) -> None:
        """Deliver these effects at once, as if the answer had fallen behind."""
        for effect in effects:
            self._stream.put(replace(effect, request_id=self.spec.request_id))
            self._num_delivered += 1

    async def taken(self, num_effects: int) -> None:
        """Wait until the answer has taken and handled ``num_effects`` effects."""
        async with asyncio.timeout(DEADLINE_S):
            while self.num_taken < num_effects:  # noqa: ASYNC110 - a stream has no event for this
                await asyncio.sleep(0)

    def _deliver(self) -> None:
        if self._effects:
            self._stream.put(self._effects.popleft())
            self._num_delivered += 1
            asyncio.get_running_loop().call_soon(self._deliver)


class ScriptedService:
    """Answers a request with the effects of ``script``. Without a script, a test feeds the requests itself."""

    def __init__(self, script: Callable[[RequestSpec], Iterable[Deliver | End]] | None = None) -> None:
        self.model: ModelInfo | None = ModelInfo(MODEL, VOCAB_SIZE, CONTEXT_TOKENS)
        self.num_instances = 1
        self.num_unplaced = 0
        self.coordinator_term = 0
        self.now_shown = Shown(0.0, (), 0.0, (), 0)
        self.requests: list[ScriptedRequest] = []
        self._submitted = asyncio.Event()
        self.script = script

    def submit(self, request: RequestSpec, stream: AnswerStream) -> None:
        scripted = ScriptedRequest(request, stream)
        self.requests.append(scripted)
        self._submitted.set()
        if self.script is not None:
            scripted.feed(self.script(request))

    def release(self, request_id: str, *, is_complete: bool = False) -> None:
        for request in self.requests:
            if request.spec.request_id == request_id and not request.released.is_set():
                request.was_complete = is_complete
                request.released.set()

    def shown_loads(self) -> Mapping[str, LoadReport]:
        return {"worker-0": load()}

    def shown(self, most_requests: int) -> Shown:
        return self.now_shown

    def counters(self) -> Mapping[str, int]:
        return {"protocol_errors": 4}

    @property
    def specs(self) -> list[RequestSpec]:
        return [request.spec for request in self.requests]

    async def request(self, index: int = 0) -> ScriptedRequest:
        """Request number ``index``, as soon as it has been submitted."""
        async with asyncio.timeout(DEADLINE_S):
            while len(self.requests) <= index:
                self._submitted.clear()
                await self._submitted.wait()
        return self.requests[index]


def says(text: str, reason: FinishReason = FinishReason.LENGTH) -> ScriptedService:
    """A service that answers every request with ``text``."""
    return ScriptedService(lambda _: one_by_one(text, reason))


def refuses(reason: RefusalReason, retry_after_s: float = 2.5) -> ScriptedService:
    """A service that refuses every request."""
    return ScriptedService(lambda _: [end(FinishReason.ERROR, reason, retry_after_s)])


def app_for(
    service: ScriptedService,
    settings: HttpSettings | None = None,
    api_keys: ApiKeys | None = None,
    template: str = TEMPLATE,
    is_stopping: Callable[[], bool] = lambda: False,
) -> ASGIApp:
    settings = settings or HttpSettings()
    chat_template = ChatTemplate(template, {}, timeout_s=settings.template_timeout_s)
    return create_app(
        service, TOKENIZER, chat_template, DESCRIPTION, settings, api_keys=api_keys, is_stopping=is_stopping
    )


def client_for(
    service: ScriptedService,
    settings: HttpSettings | None = None,
    api_keys: ApiKeys | None = None,
    template: str = TEMPLATE,
) -> httpx.AsyncClient:
    """A client that calls the app without a network."""
    transport = httpx.ASGITransport(app_for(service, settings, api_keys, template), raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=DEADLINE_S)


@asynccontextmanager
async def serving(
    app: ASGIApp,
    drain_timeout_s: float = 5.0,
    send_buffer_bytes: int | None = None,
    give_up: Callable[[], None] = lambda: None,
    tls: ssl.SSLContext | None = None,
    write_timeout_s: float = math.inf,
    stop: asyncio.Event | None = None,
    lame_duck_s: float = 0.0,
    port: int = 0,
) -> AsyncIterator[tuple[str, asyncio.Event]]:
    """The app behind the real server on a loopback port: its URL, and the event that ends it.

    Port 0 is a free one; several servers share any other. Its connections have the listener's send buffer.
    """
    stop = stop or asyncio.Event()

    async def shutdown() -> None:
        await stop.wait()

    listener = bind("127.0.0.1", port, shared=port > 0)
    if send_buffer_bytes is not None:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer_bytes)
    port = listener.getsockname()[1]
    async with asyncio.timeout(3 * DEADLINE_S), asyncio.TaskGroup() as group:
        group.create_task(
            serve(
                app,
                listener,
                shutdown=shutdown,
                drain_timeout_s=drain_timeout_s,
                give_up=give_up,
                tls=tls,
                write_timeout_s=write_timeout_s,
                lame_duck_s=lame_duck_s,
            )
        )
        try:
            yield f"http://127.0.0.1:{port}", stop
        finally:
            stop.set()
