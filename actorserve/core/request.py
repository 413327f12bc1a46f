"""A request as its instance holds it: its tokens, its KV, and why it finished."""

from array import array
from dataclasses import replace

from actorserve.core.kv.kv_holding import KVHolding
from actorserve.core.messages import Attained, Energy, FinishReason, Peer, RequestSpec, TokenLogprobs
from actorserve.core.prompt_scores import PromptScores


class Request(KVHolding):
    """The mutable state of one request on one instance, under one epoch. ``token_ids`` is prompt and output together.

    ``attained`` is the service that the gateway hears of if the instance gives the request back. ``owed_s`` is the
    service that the request must get before it gives up its blocks on the device (``core.scheduling.swapping``). It
    came to the instance at ``came_s``, and waited ``waited_s`` for its first iteration there. ``energy`` is what was
    spent on it here, known when it has ended.
    """

    __slots__ = (
        "attained",
        "came_s",
        "energy",
        "epoch",
        "finish_reason",
        "gateway",
        "logprobs",
        "num_charged",
        "num_passing_blocks",
        "num_prompt",
        "owed_s",
        "prompt_scores",
        "request_id",
        "resumed_output",
        "sampling",
        "spec",
        "waited_s",
    )

    def __init__(self, spec: RequestSpec, epoch: int, gateway: Peer) -> None:
        super().__init__((*spec.prompt_token_ids, *spec.output_token_ids), spec.cache_salt)
        self.spec = spec
        self.request_id = spec.request_id
        self.num_prompt = len(spec.prompt_token_ids)
        self.sampling = spec.sampling
        self.epoch = epoch
        self.gateway = gateway
        self.owed_s = 0.0
        self.num_charged = 0  # tokens whose computation has counted as service, and does not count again
        self.num_passing_blocks = 0  # what requests behind it got since it first did not fit
        self.attained = Attained()
        self.came_s = 0.0
        self.waited_s = 0.0
        self.energy: Energy | None = None
        # Log-probabilities of the tokens made here; the gateway already has those of earlier tokens.
        self.resumed_output = len(spec.output_token_ids)
        self.logprobs: list[TokenLogprobs | None] = []
        # A gateway that has output has the prompt's log-probabilities as well.
        self.prompt_scores: PromptScores | None = None
        if spec.sampling.prompt_logprobs >= 0 and not spec.output_token_ids:
            self.prompt_scores = PromptScores(spec.sampling.prompt_logprobs)
        self.finish_reason: FinishReason | None = None

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - self.num_prompt

    @property
    def has_decoded(self) -> bool:
        """Whether this instance has made a token of it, and not only an earlier owner."""
        return self.num_output > self.resumed_output

    @property
    def is_decoding(self) -> bool:
        """Whether no prompt is left to compute: it has decoded here, or it came with the KV of all tokens but one."""
        return self.has_decoded or (self.num_output > 0 and self.num_without_kv <= 1)

    @property
    def wants_prompt_scores(self) -> bool:
        """Whether log-probabilities of its prompt's tokens are still to be found, after the iterations in flight."""
        return self.prompt_scores is not None and self.num_tokens == self.num_prompt

    @property
    def may_reuse_kv(self) -> bool:
        """Not while the prompt's log-probabilities are wanted, because they come from computing its KV."""
        return not self.wants_prompt_scores

    def spec_now(self) -> RequestSpec:
        """The specification with all tokens so far, from which another instance can start the request."""
        return replace(self.spec, output_token_ids=tuple(self.token_ids[self.num_prompt :]))

    def will_be_full(self, max_context_tokens: int) -> bool:
        """Whether the iterations in flight make its last token, because no more are wanted or fit."""
        return self.num_left(max_context_tokens) <= 0

    def num_left(self, max_context_tokens: int) -> int:
        """How many tokens follow those that the iterations in flight make, unless a token or its client ends it."""
        num_tokens = len(self.token_ids) + self.num_coming
        num_left = self.sampling.max_tokens + self.num_prompt - num_tokens
        return min(num_left, max_context_tokens - num_tokens)

    def append(self, token_id: int, logprobs: TokenLogprobs | None) -> None:
        """Take one sampled token."""
        self.token_ids.append(token_id)
        self.logprobs.append(logprobs)

    def append_run(self, token_id: int, num_tokens: int) -> None:
        """Take the same token several times, without log-probabilities."""
        self.token_ids += array("i", (token_id,)) * num_tokens
        self.logprobs += [None] * num_tokens

    def check_finished(self, max_context_tokens: int) -> FinishReason | None:
        """Set and return the reason why no token follows those so far, or None."""
        num_output = self.num_output
        if num_output > 0:
            last = self.token_ids[-1]
            if last in self.sampling.stop_token_ids and num_output > self.sampling.min_tokens:
                self.finish_reason = FinishReason.STOP
            elif num_output >= self.sampling.max_tokens or len(self.token_ids) >= max_context_tokens:
                self.finish_reason = FinishReason.LENGTH
        return self.finish_reason
