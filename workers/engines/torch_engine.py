"""The engine that computes: a decoder in torch, a paged KV pool, a sampler; on a CPU or a CUDA device."""

import logging
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from actorserve.core.messages import ModelInfo, RequestSpec, StepDone, StepPlan
from actorserve.errors import SettingsError
from actorserve.model_files.description import DecoderConfig, ModelDescription
from workers.attention import choose_attention
from workers.batch import Batch, make_batch
from workers.engines.kind import kind_digest, platform_facts
from workers.kernels.choose import choose_kernels
from workers.kernels.numerics import numerics
from workers.kernels.tiles import AnyRows
from workers.kv.cache import KVCache, bytes_per_token
from workers.kv.pools import HostBlocks, KVPools, layout_digest
from workers.kv.swap import HostPool
from workers.kv_transfer.cuda import CudaBlocks
from workers.memory import MemoryPlan, activation_bytes, weights_bytes
from workers.models.build import load_model
from workers.models.decoder import Tiles
from workers.models.probing import probe_tiles
from workers.models.rope import angles_follow_context, max_positions
from workers.sampling.sampler import Sampler
from workers.weights.decoder_weights import Progress
from workers.weights.store import open_store

_log = logging.getLogger(__name__)


def _no_progress(_: float) -> None:
    pass


class TorchEngine:
    """Implements ``workers.engine.Engine``."""

    def __init__(
        self,
        description: ModelDescription,
        *,
        device: str = "cpu",
        dtype: str = "auto",
        num_threads: int = 1,
        tokens_per_block: int = 16,
        kv_cache_bytes: int | None = None,
        host_kv_bytes: int | None = None,
        max_context_tokens: int | None = None,
        max_batch_requests: int = 64,
        max_batch_tokens: int = 512,
        memory_bytes: int | None = None,
        progress: Progress = _no_progress,
    ) -> None:
        """Load the weights, and find out which tile sizes keep every token's bits.

        ``device``: ``cpu``, ``cuda`` or ``cuda:N``. ``dtype``: the numeric mode (``workers.kernels.numerics``).
        ``num_threads``: of this whole process, on a CPU. ``kv_cache_bytes``, ``host_kv_bytes`` (of the pool that KV is
        swapped to; 0 for none) and ``max_context_tokens`` default to what memory and model suggest.
        ``max_batch_requests`` and ``max_batch_tokens`` say how large an iteration memory must have room for, and
        ``memory_bytes`` what this process may take in all, on a CPU; None for what is available.
        ``progress`` is told the share of loading that is done.

        Raises: ModelError if the model cannot be read; SettingsError if the settings do not fit it or this machine.
        """
        if device.startswith("cuda") and not torch.cuda.is_available():
            raise SettingsError(f"device {device} was asked for, but torch finds no CUDA device")
        self._device = torch.device(device)
        self._num_threads = num_threads
        self._use_threads()
        kernels = choose_kernels(numerics(dtype, self._device), self._device)
        mode = kernels.numerics
        torch.set_float32_matmul_precision("highest")  # no TF32
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False

        config = description.config
        limit = max_positions(config)
        if max_context_tokens is not None and max_context_tokens > limit:
            raise SettingsError(f"max_context_tokens {max_context_tokens}: {description.name} has {limit} positions")
        num_positions = max_context_tokens or config.max_position_embeddings
        memory = MemoryPlan(
            self._device,
            weights_bytes=weights_bytes(description, kernels),
            activation_bytes=activation_bytes(config, max_batch_tokens, max_batch_requests),
            bytes_per_token=bytes_per_token(config, mode.kv),
            context_tokens=num_positions,
            share_bytes=memory_bytes,
            kv_cache_bytes=kv_cache_bytes,
            host_kv_bytes=host_kv_bytes,
        )
        memory.check()
        with torch.inference_mode():
            with open_store(description, mode, self._device) as store:
                self._model = load_model(description, num_positions, kernels, store, lambda done: progress(0.8 * done))
                weights_digest = store.digest
            self._attention = choose_attention(config, self._device, kernels.native)
            self.layer_tiles: Tiles
            self.head_tiles: Tiles
            if kernels.rows_are_independent:
                self.layer_tiles = self.head_tiles = AnyRows()
            else:
                self.layer_tiles, self.head_tiles = probe_tiles(self._model, self._device.type)
            self._bytes_per_block = bytes_per_token(config, mode.kv) * tokens_per_block
            pool_bytes = memory.pool_bytes()
            num_blocks = pool_bytes // self._bytes_per_block
            if num_blocks < 1:
                raise SettingsError(f"a KV cache of {pool_bytes} bytes holds no block of {self._bytes_per_block}")
            self._cache = KVCache(
                config, num_blocks, tokens_per_block, mode.kv, self._device, self._attention.keys_transposed
            )
            self._host_pool = HostPool(self._cache, memory.host_pool_bytes(pool_bytes) // self._bytes_per_block)
            self._kv = self._pools(config)
        _log.info(
            "%s with %s; attention %s; %d threads; KV cache of %d tokens, and %d on the host",
            description.name,
            kernels.describe(),
            self._attention.name,
            torch.get_num_threads(),
            num_blocks * tokens_per_block,
            self.num_host_blocks * tokens_per_block,
        )
        self._sampler = Sampler(config.vocab_size, self._device)
        self._num_prompt_tokens: dict[str, int] = {}
        max_tokens = min(num_positions, num_blocks * tokens_per_block)
        self._info = ModelInfo(description.name, config.vocab_size, max_tokens)
        self._kind = kind_digest(
            platform_facts(self._device)
            | kernels.facts()
            | {
                "weights": weights_digest,
                "positions": num_positions if angles_follow_context(config) else 0,
                "tiles": (self.layer_tiles.sizes, self.head_tiles.sizes),
                "attention": self._attention.name,
            }
        )
        progress(1.0)

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
        return self._bytes_per_block

    @property
    def num_host_blocks(self) -> int:
        return self._host_pool.num_blocks

    @property
    def num_written_host_blocks(self) -> int:
        return self._host_pool.num_written_blocks

    @property
    def kv(self) -> KVPools:
        return self._kv

    def add(self, request: RequestSpec) -> None:
        self._num_prompt_tokens[request.request_id] = len(request.prompt_token_ids)
        self._sampler.add(request)

    def drop(self, request_id: str) -> None:
        self._num_prompt_tokens.pop(request_id, None)
        self._sampler.drop(request_id)

    def step(self, plan: StepPlan) -> StepDone:
        began = time.perf_counter()
        logits = self.logits(plan)
        request_ids, positions = [], []
        for request_id, start, token_ids, samples in zip(
            plan.request_ids, plan.starts, plan.token_ids, plan.samples, strict=True
        ):
            if samples:
                request_ids.append(request_id)
                positions.append(start + len(token_ids) - self._num_prompt_tokens[request_id])
        with torch.inference_mode():
            sampled = self._sampler(logits, request_ids, positions)
        if self._device.type == "cuda" and not request_ids:
            # Nothing was fetched: a step has ended, and its time and its KV are there, once the device is done.
            torch.cuda.current_stream(self._device).synchronize()
        return StepDone(
            step_id=plan.step_id,
            duration_s=time.perf_counter() - began,
            request_ids=tuple(request_ids),
            positions=tuple(positions),
            token_ids=sampled.token_ids,
            logprobs=sampled.logprobs if any(entry is not None for entry in sampled.logprobs) else (),
        )

    def copy_out(self, device_blocks: Sequence[int], host_blocks: Sequence[int]) -> None:
        self._host_pool.copy_out(device_blocks, host_blocks)

    def copy_in(self, host_blocks: Sequence[int], device_blocks: Sequence[int]) -> None:
        self._host_pool.copy_in(host_blocks, device_blocks)

    @torch.inference_mode()
    def logits(self, plan: StepPlan) -> Tensor:
        """Run the plan without sampling: the sampling rows' logits, [rows, vocab_size] float32, in the plan's order.

        Raises: ValueError if the plan is not consistent.
        """
        if not plan.request_ids:
            return torch.empty((0, self._info.vocab_size), device=self._device)
        batch, hidden = self._forward(plan)
        if not batch.sample_rows.numel():
            return torch.empty((0, self._info.vocab_size), device=self._device)
        (logits,) = self.head_tiles.run(self._model.logits, hidden.index_select(0, batch.sample_rows))
        return logits

    @torch.inference_mode()
    def prompt_logits(self, token_ids: tuple[int, ...]) -> Tensor:
        """The logits after each token of one prompt, [len(token_ids), vocab_size] float32.

        Its KV takes the pool's first blocks, whosever they are: for an engine that serves no requests.

        Raises: ValueError if there is no token, or the pool is too small.
        """
        num_blocks = -(-len(token_ids) // self.tokens_per_block)
        if num_blocks > self.num_blocks:
            raise ValueError(f"{len(token_ids)} tokens do not fit into {self.num_blocks} blocks")
        _, hidden = self._forward(StepPlan(0, ("prompt",), (0,), (token_ids,), (tuple(range(num_blocks)),), (False,)))
        (logits,) = self.head_tiles.run(self._model.logits, hidden)
        return logits

    def _forward(self, plan: StepPlan) -> tuple[Batch, Tensor]:
        """The plan as tensors, and each of its tokens' hidden state, [T, hidden_size]."""
        self._use_threads()
        batch = make_batch(plan, self.tokens_per_block, self._device)
        if self._attention.reads_whole_blocks:
            self._cache.begin(batch)
        return batch, self._model.forward(batch, self._cache, self._attention, self.layer_tiles)

    def _pools(self, config: DecoderConfig) -> KVPools:
        blocks = self._cache.blocks
        layout = layout_digest(
            pool_dtype=str(self._cache.pool.dtype),
            tokens_per_block=self._cache.tokens_per_block,
            keys_transposed=self._cache.keys_transposed,
            block=(blocks.shape[1], blocks.shape[2]),
            model=(config.architecture, config.num_layers, config.num_kv_heads, config.head_dim),
        )
        device = CudaBlocks(blocks) if blocks.is_cuda else HostBlocks(blocks.numpy())
        host = HostBlocks(self._host_pool.blocks.numpy())
        return KVPools(
            layout,
            (blocks.shape[1], blocks.shape[2]),
            device,
            host,
            self._cache.memory,
            self._host_pool.memory,
            self._host_pool.written,
        )

    def _use_threads(self) -> None:
        """The number of threads decides bits, so it is part of the kind, and must not be left to other code."""
        if self._device.type == "cpu" and torch.get_num_threads() != self._num_threads:
            torch.set_num_threads(self._num_threads)
