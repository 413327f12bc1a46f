"""The engine that serves models: a decoder in torch, a paged KV pool and a sampler, on a CPU or a CUDA device."""

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from actorserve.core.kv.layer_groups import LayerGroups
from actorserve.core.messages import ModelInfo, PromptLogprobs, RequestSpec, StepDone, StepPlan
from actorserve.errors import SettingsError
from actorserve.model_files.description import ModelDescription
from actorserve.model_files.grammars import compiler_for
from workers import native
from workers.attention import choose_attention
from workers.attention.triton_paged import TritonPagedAttention
from workers.batch import Batch, make_batch
from workers.cuda_version import why_no_cuda
from workers.engine import EndedStep, PendingStep
from workers.engine_options import EngineOptions
from workers.engines.device_steps import DeviceSteps, GraphRecorder, graph_sizes
from workers.engines.kind import kind_digest, platform_facts
from workers.engines.last_tokens import LastTokens
from workers.engines.pools import KVForm, make_pools
from workers.engines.steps_ahead import StepsAhead
from workers.engines.tile_log import log_tiles
from workers.kernels.choose import Kernels, choose_kernels
from workers.kernels.numerics import numerics
from workers.kernels.tiles import AnyRows, RowTiles
from workers.kv.cache import bytes_per_token
from workers.kv.layer_split import split_layers
from workers.kv.pools import KVPools
from workers.memory import MemoryNeeds, MemoryPlan, activation_bytes, weights_bytes
from workers.models.build import load_model
from workers.models.decoder import Decoder
from workers.models.probing import probe_tiles
from workers.models.rope import angles_follow_context, max_positions
from workers.packed_batch import PackedBatches, PlanLimits
from workers.sampling.grammars import Grammars, PreparedGrammar
from workers.sampling.prompt_scorer import PromptScorer
from workers.sampling.sampler import Sampler
from workers.sampling.triton_choice import choose_on_gpu
from workers.weights.decoder_weights import Progress
from workers.weights.store import open_store

_log = logging.getLogger(__name__)


Loading = Callable[[str, float], None]
"""Called with what an engine does while it starts, and how much of that is done, 0 to 1."""


def _tell_nothing(_doing: str, _done: float) -> None:
    pass


_MASK_THREADS = 4  # beside a GPU; on a CPU the model needs the cores


class TorchEngine:
    """Implements ``workers.engine.Engine``."""

    def __init__(self, description: ModelDescription, options: EngineOptions, loading: Loading = _tell_nothing) -> None:
        """Load the weights, find the tile sizes that keep every token's bits, and reserve the KV pools.

        Raises: ModelError if the model cannot be read; SettingsError if the options do not fit it or this machine.
        """
        self._device = _device(options.device)
        self._num_threads = options.num_threads
        self._use_threads()
        torch.set_float32_matmul_precision("highest")  # no TF32
        # Neither sums of reduced precision nor split-K, whose order of summing depends on the number of rows.
        exact = (False, False)
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = exact
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = exact
        kernels = choose_kernels(numerics(options.dtype, self._device), self._device)
        if kernels.native:
            native.use_own_threads(kernels.numerics.weight_bits is not None)

        config = description.config
        num_positions = _num_positions(description, options)
        memory = MemoryPlan(self._device, _memory_needs(description, kernels, options, num_positions), options)
        memory.check()
        with torch.inference_mode():
            # Before the weights are read, which takes long, because a GPU's kernel may lack what builds it.
            self._attention = choose_attention(config, self._device, kernels.numerics.kv, kernels.native)
            with open_store(description, kernels.numerics, self._device) as store:
                self._model = load_model(
                    description, num_positions, kernels, store, partial(loading, "loading weights")
                )
                self.weights_digest = store.digest
            self.layer_tiles: RowTiles | AnyRows
            self.head_tiles: RowTiles | AnyRows
            self.layer_tiles, self.head_tiles = _tiles(self._model, kernels)
            log_tiles(self.layer_tiles, self.head_tiles)
            split = split_layers(config.windows, num_positions)
            form = KVForm(kernels.numerics.kv, options.tokens_per_block, self._attention.keys_transposed)
            self._pools = make_pools(
                config, split, form, self._device, memory, partial(loading, "pinning host memory for swapped KV")
            )
        self._cache = self._pools.cache
        self._row_shape = self.layer_groups.row_shape(self.tokens_per_block, options.max_batch_tokens)
        num_tokens = self._row_shape.max_rows(self.num_blocks) * self.tokens_per_block
        self._info = ModelInfo(description.name, config.vocab_size, min(num_positions, num_tokens))
        self._steps = self._device_steps(options, partial(loading, "recording CUDA graphs"))

        _log.info(
            "%s with %s; attention %s; %d threads; KV cache of %d tokens, and %d on the host%s",
            description.name,
            kernels.describe(),
            self._attention.name,
            torch.get_num_threads(),
            num_tokens,
            self._row_shape.max_rows(self.num_host_blocks) * self.tokens_per_block,
            self._describe_windows(),
        )
        self._sampler = Sampler(config.vocab_size, self._device, kernels.native)
        self._grammars = Grammars(
            lambda: compiler_for(description),
            config.vocab_size,
            description.eos_token_ids,
            num_threads=1 if self._device.type == "cpu" else _MASK_THREADS,
        )
        self._scorer = PromptScorer()
        self._last_tokens = LastTokens()
        self._ahead: StepsAhead | None = None
        if self._steps is not None:
            self._ahead = StepsAhead(
                self._steps,
                self._head,
                choose_on_gpu,
                self._sampler,
                self._grammars,
                self._scorer,
                config.vocab_size,
                self._device,
            )
        self._num_prompt_tokens: dict[str, int] = {}
        self._kind = kind_digest(
            platform_facts(self._device)
            | kernels.facts()
            | {
                "weights": self.weights_digest,
                "positions": num_positions if angles_follow_context(config) else 0,
                "tiles": (self.layer_tiles.sizes, self.head_tiles.sizes),
                "attention": self._attention.name,
            }
        )

    @property
    def model(self) -> ModelInfo:
        return self._info

    @property
    def kind(self) -> str:
        return self._kind

    @property
    def num_blocks(self) -> int:
        return self._cache.num_blocks

    @property
    def tokens_per_block(self) -> int:
        return self._cache.tokens_per_block

    @property
    def bytes_per_block(self) -> int:
        return self._pools.bytes_per_block

    @property
    def layer_groups(self) -> LayerGroups:
        return self._cache.groups

    @property
    def num_host_blocks(self) -> int:
        return self._pools.host.num_blocks

    @property
    def num_written_host_blocks(self) -> int:
        return self._pools.host.num_written_blocks

    @property
    def kv(self) -> KVPools:
        return self._pools.kv

    def prepare(self, request: RequestSpec) -> PreparedGrammar | None:
        return self._grammars.prepare(request)

    def add(self, request: RequestSpec, grammar: PreparedGrammar | None = None) -> None:
        self._num_prompt_tokens[request.request_id] = len(request.prompt_token_ids)
        self._sampler.add(request)
        self._grammars.add(request, grammar)
        self._scorer.add(request)

    def drop(self, request_id: str) -> None:
        self._num_prompt_tokens.pop(request_id, None)
        self._sampler.drop(request_id)
        self._grammars.drop(request_id)
        self._scorer.drop(request_id)
        if self._ahead is not None:
            self._ahead.drop(request_id)

    @torch.inference_mode()
    def begin(self, plan: StepPlan) -> PendingStep:
        if self._ahead is not None:
            plan = self._ahead.without_failed(plan)
            return self._ahead.begin(plan, *self._sampled(plan))
        return EndedStep(self._run(self._last_tokens.fill(plan)))

    def _run(self, plan: StepPlan) -> StepDone:
        began_s = time.perf_counter()
        request_ids, positions = self._sampled(plan)
        pending_masks = self._grammars.begin(request_ids, positions)  # other threads make them while the model runs
        logits, prompt_logprobs = self._compute(plan)
        masks = pending_masks.result()
        sampled = self._sampler(logits, request_ids, positions, masks)
        if self._device.type == "cuda" and not request_ids:
            # No token was fetched, so wait for the device: the step's time and KV must be complete.
            torch.cuda.current_stream(self._device).synchronize()
        good = [row for row in range(len(request_ids)) if row not in masks.failed]
        names = tuple(request_ids[row] for row in good)
        token_ids = tuple(sampled.token_ids[row] for row in good)
        self._grammars.append(names, token_ids)
        self._last_tokens.set(names, token_ids)
        logprobs = tuple(sampled.logprobs[row] for row in good)
        return StepDone(
            step_id=plan.step_id,
            duration_s=time.perf_counter() - began_s,
            request_ids=names,
            positions=tuple(positions[row] for row in good),
            token_ids=token_ids,
            logprobs=logprobs if any(entry is not None for entry in logprobs) else (),
            prompt_logprobs=prompt_logprobs,
            failed=tuple(request_ids[row] for row in masks.failed),
        )

    def _sampled(self, plan: StepPlan) -> tuple[list[str], list[int]]:
        """The requests that sample, and the output positions of the tokens that they get."""
        request_ids, positions = [], []
        for request_id, start, token_ids, samples in zip(
            plan.request_ids, plan.starts, plan.token_ids, plan.samples, strict=True
        ):
            if samples:
                request_ids.append(request_id)
                positions.append(start + len(token_ids) - self._num_prompt_tokens[request_id])
        return request_ids, positions

    def copy_out(self, device_blocks: Sequence[int], host_blocks: Sequence[int]) -> None:
        self._pools.host.copy_out(device_blocks, host_blocks)

    def copy_in(self, host_blocks: Sequence[int], device_blocks: Sequence[int]) -> None:
        self._pools.host.copy_in(host_blocks, device_blocks)

    def logits(self, plan: StepPlan) -> Tensor:
        """Run the plan without sampling: the sampling rows' logits, [rows, vocab_size] float32, in the plan's order.

        Raises: ValueError if a request of the plan has no token, or too few blocks.
        """
        return self._compute(plan)[0]

    @torch.inference_mode()
    def prompt_logits(self, token_ids: tuple[int, ...]) -> Tensor:
        """The logits after each token of one prompt, [len(token_ids), vocab_size] float32.

        Its KV overwrites the pool's first blocks, so the engine must not serve requests.

        Raises: ValueError if there is no token, or the pool is too small.
        """
        num_blocks = -(-len(token_ids) // self.tokens_per_block) * self.layer_groups.num_groups
        if num_blocks > self.num_blocks:
            raise ValueError(f"{len(token_ids)} tokens do not fit into {self.num_blocks} blocks")
        _, hidden = self._forward(StepPlan(0, ("prompt",), (0,), (token_ids,), (tuple(range(num_blocks)),), (False,)))
        return self._head(hidden[: len(token_ids)])

    @torch.inference_mode()
    def _compute(self, plan: StepPlan) -> tuple[Tensor, tuple[PromptLogprobs | None, ...]]:
        """Run the plan: the sampling rows' logits, [rows, vocab_size] float32, and the prompts' scores."""
        logits = torch.empty((0, self._info.vocab_size), device=self._device)
        if not plan.request_ids:
            return logits, ()
        batch, hidden = self._forward(plan)
        if batch.sample_rows.numel():
            logits = self._head(hidden.index_select(0, batch.sample_rows))
        return logits, self._scorer(plan, hidden, self._head)

    def _head(self, hidden: Tensor) -> Tensor:
        """The logits of hidden states [n, hidden_size]: [n, vocab_size] float32."""
        (logits,) = self.head_tiles.run(self._model.logits, hidden)
        return logits

    def _forward(self, plan: StepPlan) -> tuple[Batch, Tensor]:
        """The plan as tensors, and each of its tokens' hidden state, [T or more, hidden_size]."""
        if self._steps is not None:
            packed, hidden = self._steps.forward(plan)
            return packed.batch, hidden
        self._use_threads()
        batch = make_batch(plan, self.tokens_per_block, self._device, self.layer_groups.num_groups)
        if self._attention.reads_whole_blocks:
            self._cache.begin(batch)
        progress = self.kv.progress
        report = None if progress is None else progress.of_step(plan.step_id)
        return batch, self._model.forward(batch, self._cache, self._attention, self.layer_tiles, report)

    @torch.inference_mode()
    def _device_steps(self, options: EngineOptions, progress: Progress) -> DeviceSteps | None:
        """None if the attention reads a batch's numbers on the host."""
        if not isinstance(self._attention, TritonPagedAttention):
            return None
        max_rows = -(-self._info.max_tokens // self.tokens_per_block) + 1  # a step that runs ahead may need one more
        num_groups = self.layer_groups.num_groups
        limits = PlanLimits(options.max_batch_requests, options.max_batch_tokens, max_rows * num_groups, num_groups)
        batches = PackedBatches(limits, self.tokens_per_block, self._device)
        has_room = partial(self._attention.has_room, self._model.config.num_heads, self._model.config.head_dim)
        steps = DeviceSteps(
            *(self._model, self._cache, self._attention, self.layer_tiles, batches, has_room), self.kv.progress
        )
        steps.record(graph_sizes(options.max_batch_requests), GraphRecorder(), progress)
        return steps

    def _describe_windows(self) -> str:
        """What the pool's size in tokens does not say of a model whose layers have windows."""
        groups = self.layer_groups
        if not groups.num_windowed:
            return ""
        num_windowed = sum(group >= groups.num_full for group in self._cache.group_of)
        return (
            f" (of one request; {num_windowed} of {len(self._cache.group_of)} layers keep {groups.window} tokens of it)"
        )

    def _use_threads(self) -> None:
        """Set the number of threads again if other code changed it, because it decides bits and is part of the kind."""
        if self._device.type == "cpu" and torch.get_num_threads() != self._num_threads:
            torch.set_num_threads(self._num_threads)


def _device(name: str) -> torch.device:
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise SettingsError(f"device {name} was asked for, but torch finds no CUDA device: {why_no_cuda()}")
    return torch.device(name)


def _num_positions(description: ModelDescription, options: EngineOptions) -> int:
    """The longest context that is served, in tokens. Raises: SettingsError if the model has fewer positions."""
    limit = max_positions(description.config)
    wanted = options.max_context_tokens
    if wanted is not None and wanted > limit:
        raise SettingsError(f"max_context_tokens {wanted}: {description.name} has {limit} positions")
    return wanted or description.config.max_position_embeddings


def _memory_needs(
    description: ModelDescription, kernels: Kernels, options: EngineOptions, num_positions: int
) -> MemoryNeeds:
    config = description.config
    graph_tokens = options.max_batch_requests if kernels.device.type == "cuda" else 0  # graphs have memory of their own
    return MemoryNeeds(
        weights_bytes=weights_bytes(description, kernels),
        activation_bytes=activation_bytes(config, options.max_batch_tokens + graph_tokens, options.max_batch_requests),
        bytes_per_token=bytes_per_token(config, kernels.numerics.kv),
        context_tokens=num_positions,
    )


def _tiles(model: Decoder, kernels: Kernels) -> tuple[RowTiles, RowTiles] | tuple[AnyRows, AnyRows]:
    """The tiles of the layers and of the output head."""
    if kernels.rows_are_independent:
        return AnyRows(), AnyRows()
    return probe_tiles(model, kernels.device.type)
