"""The engine that computes: a decoder in torch, a paged KV pool, a sampler; on a CPU or a CUDA device."""

import importlib.util
import time
from functools import partial

import torch
from torch import Tensor

from actorserve.core.messages import ModelInfo, RequestSpec, StepDone, StepPlan
from actorserve.errors import SettingsError
from actorserve.model_files.description import DecoderConfig, ModelDescription
from workers.attention import Attention
from workers.attention.tiled import TiledAttention
from workers.attention.triton_paged import MAX_HEAD_DIM, TritonPagedAttention
from workers.batch import Batch, make_batch
from workers.kind import kind_digest, platform_facts
from workers.kv_cache import KVCache, bytes_per_token, default_pool_bytes
from workers.linear import linear_class
from workers.models.llama import Llama
from workers.models.rope import max_positions
from workers.sampler import Sampler
from workers.tiles import RowTiles, probe
from workers.weights import Progress, load_llama, weights_digest

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# One row is for machines where nothing else agrees; two take longer than four (oneDNN on Zen 4).
_LAYER_TILES = (1, *range(4, 32, 4), *range(32, 64, 8), *range(64, 128, 32), *range(128, 513, 128))
_HEAD_TILES = (1, *range(4, 32, 4), *range(32, 65, 8))  # logits are wide, and few rows want them
_BASE_ROWS = {"cpu": 16, "cuda": 64}
_OVERHEAD_ROWS = {"cpu": 8, "cuda": 128}  # rows whose computing takes as long as reading the weights


def _no_progress(_: float) -> None:
    pass


class TorchEngine:
    """Implements ``workers.engine.Engine``."""

    def __init__(
        self,
        description: ModelDescription,
        *,
        device: str = "cpu",
        dtype: str = "float32",
        num_threads: int = 1,
        tokens_per_block: int = 16,
        kv_cache_bytes: int | None = None,
        max_context_tokens: int | None = None,
        num_workers_on_host: int = 1,
        progress: Progress = _no_progress,
    ) -> None:
        """Load the weights, and find out which tile sizes keep every token's bits.

        ``device``: ``cpu``, ``cuda`` or ``cuda:N``. ``dtype``: of weights and KV. ``num_threads``: of this whole
        process, on a CPU. ``kv_cache_bytes`` and ``max_context_tokens`` default to what memory and model suggest.
        ``progress`` is told the share of loading that is done.

        Raises: ModelError if the model cannot be read; SettingsError if the settings do not fit it or this machine.
        """
        if dtype not in _DTYPES:
            raise SettingsError(f"dtype {dtype} is unknown: float32 or bfloat16")
        if device.startswith("cuda") and not torch.cuda.is_available():
            raise SettingsError(f"device {device} was asked for, but torch finds no CUDA device")
        self._device = torch.device(device)
        self._num_threads = num_threads
        self._use_threads()
        torch.set_float32_matmul_precision("highest")  # no TF32
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False

        config = description.config
        limit = max_positions(config)
        if max_context_tokens is not None and max_context_tokens > limit:
            raise SettingsError(f"max_context_tokens {max_context_tokens}: {description.name} has {limit} positions")
        num_positions = max_context_tokens or config.max_position_embeddings
        with torch.inference_mode():
            self._model = load_llama(
                description, num_positions, _DTYPES[dtype], self._device, lambda done: progress(0.8 * done)
            )
            self._attention = _attention(config, self._device)
            self.layer_tiles, self.head_tiles = _probe_tiles(self._model, self._device, _DTYPES[dtype])
            self._bytes_per_block = bytes_per_token(config, _DTYPES[dtype]) * tokens_per_block
            pool_bytes = kv_cache_bytes or default_pool_bytes(self._device, num_workers_on_host)
            num_blocks = pool_bytes // self._bytes_per_block
            if num_blocks < 1:
                raise SettingsError(f"a KV cache of {pool_bytes} bytes holds no block of {self._bytes_per_block}")
            self._cache = KVCache(config, num_blocks, tokens_per_block, _DTYPES[dtype], self._device)
        self._sampler = Sampler(config.vocab_size, self._device)
        self._num_prompt_tokens: dict[str, int] = {}
        max_tokens = min(num_positions, num_blocks * tokens_per_block)
        self._info = ModelInfo(description.name, config.vocab_size, max_tokens)
        self._kind = kind_digest(
            platform_facts(self._device)
            | {
                "weights": weights_digest(description),
                "positions": num_positions if limit > config.max_position_embeddings else 0,  # they change the angles
                "dtype": dtype,
                "linear": linear_class(self._device, _DTYPES[dtype]).__name__,
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
        return StepDone(
            step_id=plan.step_id,
            duration_s=time.perf_counter() - began,
            request_ids=tuple(request_ids),
            positions=tuple(positions),
            token_ids=sampled.token_ids,
            logprobs=sampled.logprobs if any(entry is not None for entry in sampled.logprobs) else (),
        )

    @torch.inference_mode()
    def logits(self, plan: StepPlan) -> Tensor:
        """Run the plan without sampling: the sampling rows' logits, [rows, vocab_size] float32, in the plan's order.

        Raises: ValueError if the plan is not consistent.
        """
        self._use_threads()
        if not plan.request_ids:
            return torch.empty((0, self._info.vocab_size), device=self._device)
        batch: Batch = make_batch(plan, self.tokens_per_block, self._device)
        self._cache.begin(batch)
        hidden = self._model.forward(batch, self._cache, self._attention, self.layer_tiles)
        if not batch.sample_rows.numel():
            return torch.empty((0, self._info.vocab_size), device=self._device)
        (logits,) = self.head_tiles.run(self._model.logits, hidden.index_select(0, batch.sample_rows))
        return logits

    def _use_threads(self) -> None:
        """The number of threads decides bits, so it is part of the kind, and must not be left to other code."""
        if self._device.type == "cpu" and torch.get_num_threads() != self._num_threads:
            torch.set_num_threads(self._num_threads)


def _attention(config: DecoderConfig, device: torch.device) -> Attention:
    takes_triton = config.head_dim % 16 == 0 and config.head_dim <= MAX_HEAD_DIM
    if device.type == "cuda" and takes_triton and importlib.util.find_spec("triton") is not None:
        return TritonPagedAttention()
    return TiledAttention(config.num_heads, config.num_kv_heads, config.head_dim, device)


def _probe_tiles(model: Llama, device: torch.device, dtype: torch.dtype) -> tuple[RowTiles, RowTiles]:
    """The layers' and the head's tiles. All layers have the same shapes, so the first one speaks for all."""
    config = model.config
    generator = torch.Generator().manual_seed(0)

    def rows(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    def angles(num_rows: int) -> tuple[Tensor, Tensor]:
        angle = torch.rand((num_rows, 1, config.head_dim // 2), generator=generator) * 6.3
        return angle.cos().to(device), angle.sin().to(device)

    base, overhead = _BASE_ROWS[device.type], _OVERHEAD_ROWS[device.type]
    layer = model.layers[0]
    kept = probe(
        partial(model.before_attention, layer),
        lambda num_rows: (rows(num_rows, config.hidden_size), *angles(num_rows)),
        _LAYER_TILES,
        base,
    )
    kept = probe(
        partial(model.after_attention, layer),
        lambda num_rows: (rows(num_rows, config.hidden_size), rows(num_rows, config.num_heads, config.head_dim)),
        kept,
        base,
    )
    head = probe(model.logits, lambda num_rows: (rows(num_rows, config.hidden_size),), _HEAD_TILES, base)
    return RowTiles(kept, overhead), RowTiles(head, overhead)
