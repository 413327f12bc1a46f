"""A request as its instance holds it: its tokens, how far its KV has come, and which blocks hold that."""

from dataclasses import replace

from actorserve.core.messages import Attained, FinishReason, Peer, RequestSpec, TokenLogprobs


class Request:
    """The mutable state of one request on one instance, under one epoch.

    ``token_ids`` is prompt and output together; KV exists for the first ``num_computed`` of them, in ``blocks`` of the
    device's pool or ``host_blocks`` of the host's, and in both while the copy ``copy_id`` is under way
    (``core.kv.kv_memory``). A request is *started* while it holds blocks, else it waits: it is new, or its KV was
    dropped.

    ``attained`` is what goes with it where it is given back; ``owed_s`` is the service that it shall have before it
    gives up its place on the device (``core.scheduling.swapping``). ``block_names`` are those of its first full blocks
    (``core.kv.prefix_cache``), as far as they were wanted yet. ``num_cached_tokens`` is how many tokens it found
    computed when it was first admitted; None before that.
    """

    __slots__ = (
        "attained",
        "block_names",
        "blocks",
        "copy_id",
        "epoch",
        "finish_reason",
        "gateway",
        "host_blocks",
        "logprobs",
        "num_cached_tokens",
        "num_computed",
        "num_prompt",
        "owed_s",
        "request_id",
        "resumed_output",
        "sampling",
        "spec",
        "token_ids",
    )

    def __init__(self, spec: RequestSpec, epoch: int, gateway: Peer) -> None:
        self.spec = spec
        self.request_id = spec.request_id
        self.num_prompt = len(spec.prompt_token_ids)
        self.sampling = spec.sampling
        self.epoch = epoch
        self.gateway = gateway
        self.token_ids = [*spec.prompt_token_ids, *spec.output_token_ids]
        self.num_computed = 0
        self.blocks: list[int] = []
        self.host_blocks: list[int] = []
        self.copy_id: int | None = None
        self.owed_s = 0.0
        self.attained = Attained()
        self.block_names: list[bytes] = []
        self.num_cached_tokens: int | None = None
        # Log-probabilities of the tokens made here; those made elsewhere before are with the gateway already.
        self.resumed_output = len(spec.output_token_ids)
        self.logprobs: list[TokenLogprobs | None] = []
        self.finish_reason: FinishReason | None = None

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - self.num_prompt

    @property
    def num_uncomputed(self) -> int:
        """Tokens to feed before the next can be sampled: 1 in decode, more in prefill, none never."""
        return len(self.token_ids) - self.num_computed

    @property
    def is_started(self) -> bool:
        return bool(self.blocks or self.host_blocks)

    @property
    def is_resident(self) -> bool:
        """Whether its KV lies on the device, so that it can run."""
        return bool(self.blocks) and self.copy_id is None

    @property
    def is_swapped(self) -> bool:
        """Whether its KV lies on the host alone."""
        return bool(self.host_blocks) and self.copy_id is None

    def spec_now(self) -> RequestSpec:
        """What another instance would start it from."""
        return replace(self.spec, output_token_ids=tuple(self.token_ids[self.num_prompt :]))

    def append(self, token_id: int, logprobs: TokenLogprobs | None) -> None:
        """Take one sampled token."""
        self.token_ids.append(token_id)
        self.logprobs.append(logprobs)

    def check_finished(self, max_context_tokens: int) -> FinishReason | None:
        """Set and return the reason why the tokens so far are all, or None."""
        num_output = self.num_output
        if num_output > 0:
            last = self.token_ids[-1]
            if last in self.sampling.stop_token_ids and num_output > self.sampling.min_tokens:
                self.finish_reason = FinishReason.STOP
            elif num_output >= self.sampling.max_tokens or len(self.token_ids) >= max_context_tokens:
                self.finish_reason = FinishReason.LENGTH
        return self.finish_reason
