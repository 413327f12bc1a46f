"""A deterministic engine without a model, for tests of everything around the engine.

It keeps a KV pool of one integer a slot, in shared memory as the real engine does. Each token's entry is a hash of the
token and of the entry before it, which is read back through the block table. So a sampled token depends on every token
before it, and a block that was overwritten, freed too early, listed in the wrong order or copied to the wrong place
changes the answer. With layer groups (``core.kv.layer_groups``) each group has the entries, and a windowed group whose
entries within the window differ from the others' changes the answer, too.
"""

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from actorserve.core.kv.layer_groups import NO_BLOCK, ONE_GROUP, LayerGroups
from actorserve.core.messages import ModelInfo, PromptLogprobs, RequestSpec, StepDone, StepPlan, TokenLogprobs
from actorserve.model_files.grammars import GrammarCompiler
from workers.engine import EndedStep
from workers.engines.fake_choice import FakeChoice, compiler_of_bytes
from workers.engines.last_tokens import LastTokens
from workers.kv.layer_progress import LayerProgress
from workers.kv.pools import HostBlocks, KVPools, check_copy, layout_digest, view
from workers.kv.shared_memory import SharedMemory
from workers.sampling.grammars import PreparedGrammar

FAKE_MODEL = ModelInfo("fake", vocab_size=1000, max_tokens=4096)
BYTES_PER_TOKEN = 8  # of KV


def _mix(*values: int) -> int:
    digest = hashlib.blake2b(repr(values).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big")


def expected_tokens(request: RequestSpec, vocab_size: int, num_tokens: int) -> list[int]:
    """The tokens that a FakeEngine must make for ``request``: the reference that tests compare with."""
    tokens = [*request.prompt_token_ids, *request.output_token_ids]
    entries = expected_entries(tokens)
    entry = entries[-1] if entries else 0
    for position in range(len(tokens), len(tokens) + num_tokens):
        token = _mix(entry, request.sampling.seed, position) % vocab_size
        tokens.append(token)
        entry = _mix(entry, token, position)
    return tokens[len(request.prompt_token_ids) + len(request.output_token_ids) :]


def expected_entries(token_ids: Sequence[int]) -> list[int]:
    """The KV entries, in the first layer group, that a FakeEngine must have for these tokens."""
    entries = []
    entry = 0
    for position, token in enumerate(token_ids):
        entry = _mix(entry, token, position)
        entries.append(entry)
    return entries


def expected_scores(request: RequestSpec, vocab_size: int) -> PromptLogprobs:
    """The log-probabilities of the prompt that a FakeEngine must find for ``request``."""
    return _scores(request, expected_entries(request.prompt_token_ids[:-1]), 1, vocab_size)


def _scores(request: RequestSpec, entries: Sequence[int], position: int, vocab_size: int) -> PromptLogprobs:
    """The scores of the prompt's tokens from ``position`` on, which depend on the KV entries of those before."""
    num_best = min(request.sampling.prompt_logprobs, vocab_size)
    token_ids: list[int] = []
    logprobs: list[float] = []
    ranks: list[int] = []
    for entry, token in zip(entries, request.prompt_token_ids[position:], strict=False):
        best = [_mix(entry, number) % vocab_size for number in range(num_best)]
        token_ids += token, *best
        logprobs += (-(_mix(entry, one) % 1000) / 100 for one in (token, *best))
        ranks += _mix(entry, token) % vocab_size + 1, *range(1, num_best + 1)
    return PromptLogprobs(num_best, tuple(token_ids), tuple(logprobs), tuple(ranks))


class FakeEngine:
    """Implements ``workers.engine.Engine``.

    ``model``: the model that it claims to serve; the pool bounds ``max_tokens``. ``layer_groups`` are those of its
    layers. ``step_s`` and ``copy_s``: how long an iteration and a copy of any size take at least. ``make_compiler``
    makes the compiler of the requests' grammars, for a model that ends with ``eos_ids``; None: for a model whose tokens
    are bytes.
    """

    def __init__(
        self,
        model: ModelInfo = FAKE_MODEL,
        num_blocks: int = 256,
        tokens_per_block: int = 16,
        num_host_blocks: int = 0,
        step_s: float = 0.0,
        copy_s: float = 0.0,
        make_compiler: Callable[[], GrammarCompiler] | None = None,
        eos_ids: Sequence[int] = (0,),
        layer_groups: LayerGroups = ONE_GROUP,
        weights_digest: str = "",
    ) -> None:
        num_tokens = num_blocks // layer_groups.num_groups * tokens_per_block
        self.model = replace(model, max_tokens=min(model.max_tokens, num_tokens))
        self.layer_groups = layer_groups
        self.kind = f"fake-{model.vocab_size}"
        self.weights_digest = weights_digest
        self.num_blocks = num_blocks
        self.tokens_per_block = tokens_per_block
        self.bytes_per_block = BYTES_PER_TOKEN * tokens_per_block
        self.num_host_blocks = num_host_blocks
        shape = (1, self.bytes_per_block)
        memory = SharedMemory(num_blocks * self.bytes_per_block)
        host_memory = SharedMemory(num_host_blocks * self.bytes_per_block) if num_host_blocks else None
        self._device = HostBlocks(view(memory.buffer, num_blocks, shape, on_host=False))
        self._host = HostBlocks(view(host_memory.buffer if host_memory else b"", num_host_blocks, shape, on_host=True))
        layout = layout_digest(engine="fake", tokens_per_block=tokens_per_block)
        self.progress = LayerProgress(1)
        self.kv = KVPools(layout, shape, self._device, self._host, memory, host_memory, progress=self.progress)
        self._written_host_blocks = self.kv.host_written
        self._kv = memoryview(memory.buffer).cast("Q")
        self._requests: dict[str, RequestSpec] = {}
        vocab_size = model.vocab_size
        load = make_compiler or partial(compiler_of_bytes, vocab_size)
        self._choice = FakeChoice(load, vocab_size, eos_ids)
        self._last_tokens = LastTokens()
        self._step_s = step_s
        self._copy_s = copy_s

    @property
    def num_requests(self) -> int:
        """Requests that were added and not dropped yet."""
        return len(self._requests)

    @property
    def num_written_host_blocks(self) -> int:
        return len(self._written_host_blocks)

    def prepare(self, request: RequestSpec) -> PreparedGrammar | None:
        return self._choice.grammars.prepare(request)

    def add(self, request: RequestSpec, grammar: PreparedGrammar | None = None) -> None:
        self._requests[request.request_id] = request
        self._choice.grammars.add(request, grammar)

    def drop(self, request_id: str) -> None:
        self._requests.pop(request_id, None)
        self._choice.grammars.drop(request_id)

    def begin(self, plan: StepPlan) -> EndedStep:
        if self._step_s:
            time.sleep(self._step_s)
        plan = self._last_tokens.fill(plan)
        entries: list[int] = []
        request_ids: list[str] = []
        positions: list[int] = []
        scores: list[PromptLogprobs | None] = [None] * len(plan.scores)
        for row, request_id in enumerate(plan.request_ids):
            fed = self._feed(plan, row)
            request = self._requests[request_id]
            if plan.scores and plan.scores[row]:
                position = plan.starts[row] + 1
                if position < len(request.prompt_token_ids):
                    scores[row] = _scores(request, fed, position, self.model.vocab_size)
            if plan.samples[row]:
                position = plan.starts[row] + len(plan.token_ids[row])
                entries.append(_mix(fed[-1], request.sampling.seed, position))
                request_ids.append(request_id)
                positions.append(position - len(request.prompt_token_ids))
        masks = self._choice.grammars.begin(request_ids, positions).result()
        allowed = dict(zip(masks.rows, masks.allowed, strict=True))
        good = [row for row in range(len(request_ids)) if row not in masks.failed]
        token_ids = [self._choice.choose(allowed.get(row), entries[row]) for row in good]
        names = tuple(request_ids[row] for row in good)
        self._choice.grammars.append(names, token_ids)
        self._last_tokens.set(names, token_ids)
        logprobs = [
            TokenLogprobs(-0.5, (token,), (-0.5,))
            if self._requests[request_ids[row]].sampling.top_logprobs >= 0
            else None
            for row, token in zip(good, token_ids, strict=True)
        ]
        done = StepDone(
            step_id=plan.step_id,
            duration_s=self._step_s,
            request_ids=names,
            positions=tuple(positions[row] for row in good),
            token_ids=tuple(token_ids),
            logprobs=tuple(logprobs) if any(logprobs) else (),
            prompt_logprobs=tuple(scores),
            failed=tuple(request_ids[row] for row in masks.failed),
        )
        self.progress.end(plan.step_id)
        return EndedStep(done)

    def copy_out(self, device_blocks: Sequence[int], host_blocks: Sequence[int]) -> None:
        self._begin_copy(device_blocks, host_blocks)
        self._written_host_blocks.update(host_blocks)
        self._host.write(host_blocks, self._device.array, device_blocks)

    def copy_in(self, host_blocks: Sequence[int], device_blocks: Sequence[int]) -> None:
        self._begin_copy(device_blocks, host_blocks)
        self._device.write(device_blocks, self._host.array, host_blocks)

    def fetch_from(
        self,
        source: "FakeEngine",
        source_blocks: Sequence[int],
        blocks: Sequence[int],
        *,
        on_host: bool = False,
        into_host: bool = False,
    ) -> None:
        """Copy another engine's ``source_blocks`` into our ``blocks``, in order, as ``workers.kv_transfer`` does.

        ``on_host`` and ``into_host`` choose the host's pool of the source and of this engine.

        Raises: ValueError as ``check_copy`` does.
        """
        num_there = source.num_host_blocks if on_host else source.num_blocks
        check_copy(blocks, self.num_host_blocks if into_host else self.num_blocks, source_blocks, num_there)
        pool = source._host if on_host else source._device
        (self._host if into_host else self._device).write(blocks, pool.array, source_blocks)

    def entries(self, block: int, group: int, *, on_host: bool = False) -> list[int]:
        """What a block of this layer group holds now: an entry for each of its tokens, as in the first group."""
        pool = self._host if on_host else self._device
        return [(entry - group) % 2**64 for entry in pool.array[block].view("u8")[0].tolist()]

    def _begin_copy(self, device_blocks: Sequence[int], host_blocks: Sequence[int]) -> None:
        check_copy(device_blocks, self.num_blocks, host_blocks, self.num_host_blocks)
        if self._copy_s:
            time.sleep(self._copy_s)

    def _feed(self, plan: StepPlan, row: int) -> list[int]:
        """Write the KV entries of a chunk, and return them."""
        table, size, groups = plan.block_tables[row], self.tokens_per_block, self.layer_groups

        def slot(position: int, group: int) -> int:
            block = table[position // size * groups.num_groups + group]
            if block == NO_BLOCK:
                raise ValueError(f"group {group} of {plan.request_ids[row]} has no block at position {position}")
            return block * size + position % size

        start = plan.starts[row]
        entry = self._kv[slot(start - 1, 0)] if start else 0
        entries = []
        for position, token in enumerate(plan.token_ids[row], start):
            for seen in range(max(0, position - groups.window + 1), position):
                found = {(self._kv[slot(seen, group)] - group) % 2**64 for group in range(groups.num_groups)}
                entry = entry if len(found) == 1 else _mix(*sorted(found))
            entry = _mix(entry, token, position)
            for group in range(groups.num_groups):
                self._kv[slot(position, group)] = (entry + group) % 2**64
            entries.append(entry)
        return entries
