"""What messages are made of: who is who, what a request is, and why things end. All of it crosses the wire."""

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple


class Peer(NamedTuple):
    """A process as others know it: its stable name, and which life of it this is (grows with every start)."""

    name: str
    incarnation: int


LOCAL = Peer("", 0)
"""The sender of a message that never left its process."""


class Role(StrEnum):
    GATEWAY = "gateway"
    COORDINATOR = "coordinator"
    WORKER = "worker"


class FinishReason(StrEnum):
    """Why a request ended. ``STOP`` and ``LENGTH`` are successes; each request ends exactly once."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class RefusalReason(StrEnum):
    """Why a request was not taken; the gateway turns it into an HTTP status."""

    TOO_LARGE = "too_large"  # never fits this instance, however empty
    OVERLOADED = "overloaded"  # the cluster's queue is full, or the instance has no memory for it now
    NO_INSTANCE = "no_instance"  # nobody came to serve it in time
    DRAINING = "draining"  # the instance is shutting down


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose tokens, and when to stop. Complete: two requests with equal params and tokens go on equally.

    ``seed`` is always set (the gateway draws one where the client gave none): token ``i`` is chosen with randomness
    that depends on ``(seed, i)`` alone. ``top_k`` 0 and ``top_p`` 1.0 switch those off; temperature 0 is greedy.
    ``top_logprobs`` -1 asks for none, 0 for the chosen token's, k for the k best beside it.
    """

    seed: int
    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    stop_token_ids: tuple[int, ...] = ()  # includes end-of-sequence, unless the client ignores it
    top_logprobs: int = -1


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities of one position, from the model's raw logits: the chosen token's and the best others'."""

    logprob: float
    top_token_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class RequestSpec:
    """A request, whole: enough for any worker to start it, or to carry it on from the tokens already made.

    Position ``i`` of ``prompt_token_ids + output_token_ids`` is absolute and the same on every worker.
    ``output_token_ids`` is empty at first, and holds what the client already has after a failover. Requests share KV
    only with those of the same ``cache_salt``. A lower ``priority`` is more urgent.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    output_token_ids: tuple[int, ...] = ()
    priority: int = 0
    cache_salt: str = ""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What a worker serves. ``max_tokens`` bounds prompt + output: the model's context or the KV pool's capacity."""

    name: str
    vocab_size: int
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Speed:
    """How fast a worker is, as far as the coordinator's queue needs it: points of its profile's prefill curve (tokens,
    seconds; ``core.timing.profile``), and the shortest iteration, which is the first quantum.
    """

    prefill_tokens: tuple[int, ...]
    prefill_s: tuple[float, ...]
    min_iteration_s: float


@dataclass(frozen=True, slots=True)
class Attained:
    """What a request had from a multi-level feedback queue so far, in durations: whoever receives it derives the level.

    ``service_s`` in all; ``quantum_s`` of the level that it was on (0: it is new, and joins by its prefill time) and
    what it used of that; ``waited_s`` since it last ran, or since it came.
    """

    service_s: float = 0.0
    quantum_s: float = 0.0
    quantum_used_s: float = 0.0
    waited_s: float = 0.0


NEWCOMER = Attained()
"""What a request attained that had nothing yet."""


@dataclass(frozen=True, slots=True)
class KVAccess:
    """How another worker reads this worker's KV pools (``workers.kv_transfer``); the core only hands it on.

    Blocks can be copied between pools of one ``layout``. At ``address`` blocks are sent. The rest may be empty:
    ``host`` names the machine, where ``shared`` and ``shared_host`` (memory of the device's and the host's pool that
    can be mapped) and ``cuda_ipc`` (a GPU's memory) are of use; ``nixl`` is for RDMA.
    """

    layout: str
    address: str
    num_blocks: int = 0
    num_host_blocks: int = 0
    host: str = ""
    shared: str = ""
    shared_host: str = ""
    cuda_ipc: str = ""
    nixl: str = ""
