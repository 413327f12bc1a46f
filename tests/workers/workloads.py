"""Random workloads for an instance with a real engine: clients, pools, a policy, and the pace of steps and copies."""

import json
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from actorserve.core.messages import RequestSpec, SamplingParams
from actorserve.core.scheduling.swapping import SwapMode

VOCAB_SIZE = 211
TOKENS_PER_BLOCK = 8
NUM_HOST_BLOCKS = 12
MAX_STEPS = 5000  # far more than any workload takes
STEMS = tuple((*[first] * TOKENS_PER_BLOCK, *range(50, 90)) for first in (1, 2))
"""Beginnings of prompts, so that requests share blocks. The stems differ only in their first block."""


@dataclass(frozen=True)
class Client:
    """Asks at iteration ``asks_at_step``, and leaves ``patience_steps`` later unless its answer is complete."""

    prompt: tuple[int, ...]
    sampling: SamplingParams
    cache_salt: str
    asks_at_step: int
    patience_steps: int


@dataclass(frozen=True)
class CopyPace:
    """When a copy is made: as early as allowed, or at the last moment. It ends ``num_steps`` steps after its issue."""

    early: bool
    num_steps: int


@dataclass(frozen=True)
class Workload:
    """Clients, and the instance that serves them: its pools, its policy, its iterations, and the durations of steps
    and copies.
    """

    clients: tuple[Client, ...]
    num_spare_blocks: int
    max_batch_tokens: int
    tpot_target_s: float
    durations_s: tuple[float, ...]
    policy: str
    swap_mode: SwapMode
    num_host_blocks: int
    copies: tuple[CopyPace, ...]

    @property
    def specs(self) -> list[RequestSpec]:
        return [
            RequestSpec(f"r{index}", client.prompt, client.sampling, cache_salt=client.cache_salt)
            for index, client in enumerate(self.clients)
        ]

    def changes(self, num_groups: int) -> dict[str, Any]:
        """What the workload says of the instance's config, for a model of so many layer groups."""
        names = ("max_batch_tokens", "tpot_target_s", "swap_mode")
        num_blocks, num_host_blocks = self.num_blocks * num_groups, self.num_host_blocks * num_groups
        sizes = {"num_blocks": num_blocks, "num_host_blocks": num_host_blocks}
        return sizes | {name: getattr(self, name) for name in names}

    @property
    def num_blocks(self) -> int:
        """Room for the largest request and little more, so that requests are preempted and cached blocks evicted."""
        most = max(len(client.prompt) + client.sampling.max_tokens for client in self.clients)
        return -(-most // TOKENS_PER_BLOCK) + self.num_spare_blocks


GRAMMARS = tuple(
    json.dumps({"grammars": [{"lark_grammar": lark}]})
    for lark in ('start: ("a" | "bc" | "b" /[x-z]/)*', 'start: /[a-f]{3}/ "-" /[0-9]{2,5}/')
)
"""One never ends, and one ends soon: then only the end of the sequence is possible."""
PROMPTS = st.builds(
    lambda stem, num_shared, rest: (*stem[:num_shared], *rest),
    st.sampled_from(STEMS),
    st.sampled_from([0, TOKENS_PER_BLOCK, 20, 5 * TOKENS_PER_BLOCK, len(STEMS[0])]),
    st.sampled_from([(7,), (7,) * TOKENS_PER_BLOCK])
    | st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=20).map(tuple),
)
SAMPLINGS = st.builds(
    SamplingParams,
    seed=st.integers(0, 3),
    max_tokens=st.sampled_from([1, 8, 30]),
    temperature=st.sampled_from([0.0, 1.0]),
    frequency_penalty=st.sampled_from([0.0, 0.5]),
    top_logprobs=st.just(2),
    prompt_logprobs=st.sampled_from([-1, -1, 0, 3]),
    grammar=st.sampled_from(["", "", *GRAMMARS]),
)
CLIENTS = st.builds(
    Client,
    PROMPTS,
    SAMPLINGS,
    st.sampled_from(["", "", "tenant"]),
    st.integers(0, 12),
    st.sampled_from([*[10**6] * 5, 3]),
)
WORKLOADS = st.builds(
    Workload,
    st.lists(CLIENTS, min_size=4, max_size=10).map(tuple),
    num_spare_blocks=st.integers(0, 6),
    max_batch_tokens=st.sampled_from([3, 16, 50, 200]),
    tpot_target_s=st.sampled_from([0.01, float("inf")]),
    durations_s=st.lists(st.floats(1e-4, 0.1), min_size=1, max_size=8).map(tuple),
    policy=st.sampled_from(["skip_join_mlfq", "fcfs"]),
    swap_mode=st.sampled_from(SwapMode),
    num_host_blocks=st.sampled_from([0, 3, NUM_HOST_BLOCKS, NUM_HOST_BLOCKS]),
    copies=st.lists(st.builds(CopyPace, st.booleans(), st.integers(0, 4)), min_size=1, max_size=5).map(tuple),
)
BUSY = Workload(
    tuple(
        Client(
            (*STEMS[number % 2][: 8 * (1 + number % 3)], *range(number)),
            SamplingParams(
                seed=number,
                max_tokens=20,
                temperature=number % 2,
                top_logprobs=2,
                prompt_logprobs=1 if number in (2, 5) else -1,
                grammar=("", *GRAMMARS)[number % 3],
            ),
            cache_salt="",
            asks_at_step=number,
            patience_steps=3 if number == 4 else 10**6,
        )
        for number in range(10)
    ),
    num_spare_blocks=4,
    max_batch_tokens=16,
    tpot_target_s=float("inf"),
    durations_s=(0.01,),
    policy="skip_join_mlfq",
    swap_mode=SwapMode.PROACTIVE,
    num_host_blocks=NUM_HOST_BLOCKS,
    copies=(CopyPace(early=False, num_steps=2), CopyPace(early=True, num_steps=1), CopyPace(early=False, num_steps=0)),
)
"""A workload with preemptions, swaps, shared prefixes and a client that leaves early."""
