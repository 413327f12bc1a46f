"""The values that messages are made of. All of them cross the wire."""

from enum import StrEnum
from typing import NamedTuple

from actorserve.core.messages.value import value


class Peer(NamedTuple):
    """A process as other processes know it: its stable name, and its incarnation, which grows with every start."""

    name: str
    incarnation: int

    @property
    def host(self) -> str:
        """The name's part before the slash, which names the process's host; empty in a cluster of one host."""
        return self.name.rpartition("/")[0]


MAX_GRAMMAR_BYTES = 256 * 1024
"""The greatest length of ``SamplingParams.grammar``, in UTF-8. Most strings in messages are short
(``actorserve.wire.schema``).
"""

MAX_MEMORY_NAME_BYTES = 64 * 1024
"""The greatest length of each name of a pool's memory in a ``KVAccess``, in UTF-8. A network card's or a GPU's name of
memory may have several kilobytes, and several cards need several names.
"""

LOCAL = Peer("", 0)
"""The sender of a message that has not left its process."""


class Role(StrEnum):
    GATEWAY = "gateway"
    COORDINATOR = "coordinator"
    WORKER = "worker"
    POWER = "power"


class Cordon(StrEnum):
    """What an operator ordered of a worker; it lasts until the operator takes it back."""

    OPEN = "open"  # no order: the worker takes requests
    CORDONED = "cordoned"  # it gets no requests, neither new ones nor moved ones, and goes on with those that it has
    EMPTYING = "emptying"  # in addition its requests move to other workers, and it does not end once they have left


class InstanceRole(StrEnum):
    """Which phases of its requests an instance computes (Splitwise, section 4.1)."""

    MIXED = "mixed"  # prompts, and the tokens after them
    PROMPT = "prompt"  # prompts; it hands requests over to token instances after their first token
    TOKEN = "token"  # the tokens after prompts that prompt instances computed


class FinishReason(StrEnum):
    """Why a request ended. ``STOP`` and ``LENGTH`` are successes; each request ends exactly once."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class RefusalReason(StrEnum):
    """Why a request was refused; the gateway turns it into an HTTP status."""

    TOO_LARGE = "too_large"  # it would not even fit an empty instance
    OVERLOADED = "overloaded"  # the cluster's queue is full, or the instance has no memory for it now
    NO_INSTANCE = "no_instance"  # no instance appeared in time
    DRAINING = "draining"  # the instance is shutting down
    CANCELLED = "cancelled"  # an operator ended it


@value
class SamplingParams:
    """How to sample tokens, and when to stop. Requests with equal parameters and tokens continue equally.

    ``seed`` is always set (the gateway draws one if the client gave none): token ``i`` is chosen with randomness
    that depends on ``(seed, i)`` alone. ``top_k`` 0 and ``top_p`` 1.0 switch those off; temperature 0 is greedy.
    ``top_logprobs`` -1 asks for none, 0 for the chosen token's, k for that and the k best; ``prompt_logprobs`` asks for
    those of the prompt's tokens in the same way. ``grammar``, if not empty, bounds the output's text: it is
    a grammar as llguidance writes it, in JSON, of at most ``MAX_GRAMMAR_BYTES``.
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
    stop_token_ids: tuple[int, ...] = ()  # with end-of-sequence, unless the client ignores it
    top_logprobs: int = -1
    prompt_logprobs: int = -1
    grammar: str = ""


@value
class TokenLogprobs:
    """Log-probabilities at one position, from the model's raw logits: the sampled token's, and the best others'."""

    logprob: float
    top_token_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]


@value
class PromptLogprobs:
    """Log-probabilities of consecutive tokens of a prompt, from the model's raw logits, as parallel columns.

    Each token has ``1 + num_best`` entries: its own, and those of the tokens that were most likely at its position, the
    best first. A rank counts from 1, the most likely token. A prompt's first token has no entries, because no logits
    come before it.
    """

    num_best: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    ranks: tuple[int, ...]


@value
class RequestSpec:
    """A whole request: enough for any worker to start it, or to continue it after the tokens generated so far.

    Position ``i`` of ``prompt_token_ids + output_token_ids`` is absolute and the same on every worker.
    ``output_token_ids`` is empty at first; after a failover it holds the tokens that the client has. Requests share KV
    only with those of the same ``cache_salt``. A lower ``priority`` is more urgent. ``client`` names the API key that
    the request came with; empty without API keys.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    output_token_ids: tuple[int, ...] = ()
    priority: int = 0
    cache_salt: str = ""
    client: str = ""


@value
class ModelInfo:
    """What a worker serves. ``max_tokens`` bounds prompt + output: the model's context or the KV pool's capacity."""

    name: str
    vocab_size: int
    max_tokens: int


@value
class Speed:
    """A worker's speed, as far as the coordinator's queue needs it: points of its profile's prefill curve (tokens,
    seconds; ``core.timing.profile``), and the shortest iteration, which is the first quantum.
    """

    prefill_tokens: tuple[int, ...]
    prefill_s: tuple[float, ...]
    min_iteration_s: float


@value
class Attained:
    """What a scheduling policy knows of a request that moves, in durations. The receiver derives its own order from it.

    ``service_s`` is its attained service. ``quantum_s`` is the quantum of its level (0: the request is new, and joins
    by its prefill time), and ``quantum_used_s`` the part that it has used. ``waited_s`` is the time since it last ran,
    or since it arrived, and ``age_s`` the time since its client sent it. ``expected_tokens`` is how long its last owner
    expected its output to be, with the tokens so far (0: unknown).
    """

    service_s: float = 0.0
    quantum_s: float = 0.0
    quantum_used_s: float = 0.0
    waited_s: float = 0.0
    age_s: float = 0.0
    expected_tokens: float = 0.0


NEWCOMER = Attained()
"""What a new request has attained: nothing."""


@value
class Energy:
    """The energy of a request by phase, in joules: of its prompt, and of the tokens after it
    (``core.power.accounting``). Where it is not known, there is None in place of an Energy.
    """

    prompt_j: float = 0.0
    token_j: float = 0.0


NOTHING_SPENT = Energy()
"""The energy of a request that an instance has computed nothing of."""


def total_energy(one: Energy | None, other: Energy | None) -> Energy | None:
    """The sum; None if one of them is not known."""
    if one is None or other is None:
        return None
    return Energy(one.prompt_j + other.prompt_j, one.token_j + other.token_j)


@value
class KVAccess:
    """How another worker reads this worker's KV pools (``workers.kv_transfer``). The core only passes it on.

    Blocks can be copied between pools of one ``layout``. The server at ``address`` sends blocks. The other fields may
    be empty. ``host`` names the machine; on the same machine, ``shared`` and ``shared_host`` name mappable memory of
    the device's and of the host's pool, and ``cuda_ipc`` a GPU's memory, in at most ``MAX_MEMORY_NAME_BYTES`` each.
    ``progress`` names the memory in which the worker shows how far its iterations are. A worker that has one can also
    read KV that another worker's iteration still writes (``KVTicket.step_id``).
    """

    layout: str
    address: str
    num_blocks: int = 0
    num_host_blocks: int = 0
    host: str = ""
    shared: str = ""
    shared_host: str = ""
    cuda_ipc: str = ""
    progress: str = ""


@value
class WorkerInfo:
    """What a worker tells every process that it meets.

    ``kind`` identifies all that its results depend on (weights, numeric mode, kernels, ISA or GPU, threads): workers of
    one kind give the same tokens. ``speed`` and ``kv`` may be unknown.
    """

    kind: str
    model: ModelInfo
    speed: Speed | None = None
    kv: KVAccess | None = None
