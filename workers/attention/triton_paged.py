"""Paged attention on CUDA with one Triton kernel for prefill chunks and decode.

One kernel in one configuration serves every step. So a query's result has the same bits alone, within a chunk or in a
batch, and for any block size. The price: the keys of one request are never split over programs, so a long context in a
small batch leaves most of a GPU idle. Splitting at fixed positions and combining in ascending order would keep the
bits too, if prefill rounded in the same places.
"""

import importlib
import os
import subprocess
from importlib.metadata import version
from typing import Any, Protocol

import torch
from torch import Tensor

from actorserve.errors import SettingsError
from actorserve.model_files.description import DecoderConfig

MAX_HEAD_DIM = 256
_NO_WINDOW = 2**30  # longer than any context, and far below int32's limit

# (least rows, keys, head_dim above which keys are halved). IEEE float32 does not use tensor cores, and larger tiles
# would only spill registers.
_TILES = {torch.float32: (16, 32, 64), torch.bfloat16: (64, 64, 128)}


class PagedBatch(Protocol):
    """What the kernel reads of a ``workers.batch.Batch`` (tensors int32, on the device; R requests)."""

    @property
    def query_starts(self) -> Tensor:
        """[R + 1]: the index of each request's first token, and the number of tokens."""
        ...

    @property
    def context_lens(self) -> Tensor:
        """[R]: tokens up to and with this step's last."""
        ...

    @property
    def block_tables(self) -> Tensor:
        """[R, max_blocks]: a request's blocks in order of position."""
        ...

    @property
    def tokens_per_block(self) -> int: ...


class _OneToken:
    """A batch of one token of one request (``PagedBatch``)."""

    tokens_per_block = 1

    def __init__(self, device: torch.device) -> None:
        self.query_starts = torch.tensor([0, 1], dtype=torch.int32, device=device)
        self.context_lens = torch.tensor([1], dtype=torch.int32, device=device)
        self.block_tables = torch.tensor([[0]], dtype=torch.int32, device=device)


class TritonPagedAttention:
    """The backend; see ``workers.attention`` for the protocol.

    float32 inputs are multiplied in IEEE float32 (no TF32). bfloat16 inputs use the tensor cores, with float32 sums
    and softmax, and weights rounded to bfloat16.
    """

    reads_whole_blocks = False
    keys_transposed = False

    def __init__(self, scale: float) -> None:
        """``scale``: the factor of scores. Raises: SettingsError if Triton cannot be imported."""
        self._scale = scale
        try:
            self._kernel: Any = importlib.import_module("workers.attention.triton_kernel").paged_attention
        except ImportError as error:
            raise SettingsError(f"attention by triton-paged needs the package triton: {error}") from error
        # The tiles and the compiler decide bits, so they are in the name.
        tiles = ",".join(f"{str(dtype)[6:]}:{rows}x{keys}" for dtype, (rows, keys, _) in _TILES.items())
        self.name = f"triton-paged triton={version('triton')} {tiles}"
        self._interpreted = os.environ.get("TRITON_INTERPRET") == "1"

    def try_out(self, config: DecoderConfig, dtype: torch.dtype, device: torch.device) -> None:
        """Compile the kernel for a model's shapes and run it for one token, before the model is loaded.

        Raises: SettingsError that says what is missing.
        """
        query = torch.zeros((1, config.num_heads, config.head_dim), dtype=dtype, device=device)
        keys = torch.zeros((config.num_kv_heads, 1, config.head_dim), dtype=dtype, device=device)
        try:
            self(query, keys, keys, _OneToken(device)).sum().item()  # waits for the kernel
        except (RuntimeError, OSError, subprocess.SubprocessError) as error:
            said = str(error).strip().splitlines() or [type(error).__name__]
            raise SettingsError(
                f"Triton cannot build its kernels here, for which it needs gcc and Python's headers "
                f"(apt install gcc python3-dev): {said[-1]}"
            ) from error

    def __call__(
        self, query: Tensor, keys: Tensor, values: Tensor, batch: PagedBatch, window: int | None = None
    ) -> Tensor:
        """Causal attention of this step's tokens over their requests' contexts.

        ``query``: [T, num_heads, head_dim]; ``keys``, ``values``: [num_kv_heads, num_slots, head_dim], already with
        this step's tokens; only the last dimension must be contiguous. With a ``window`` a token at position
        p sees the keys from p - window + 1 to p.

        Returns: [T, num_heads, head_dim] in the query's dtype. Raises: ValueError for shapes, types or devices that
        the kernel does not take.
        """
        tile_rows, tile_keys, tile_queries = self._tile(query, keys, values)
        num_tokens, num_heads, head_dim = query.shape
        num_kv_heads = keys.shape[0]
        out = torch.empty((num_tokens, num_heads, head_dim), dtype=query.dtype, device=query.device)
        num_requests = batch.context_lens.shape[0]
        if num_tokens == 0:
            return out
        # An upper bound of the number of tiles: reading the lengths would wait for the device.
        num_tiles = num_tokens // tile_queries + num_requests
        self._kernel[(num_tiles, num_kv_heads)](
            query,
            keys,
            values,
            out,
            batch.query_starts,
            batch.context_lens,
            batch.block_tables,
            num_requests,
            batch.tokens_per_block,
            batch.block_tables.stride(0),
            self._scale,
            _NO_WINDOW if window is None else min(window, _NO_WINDOW),
            query.stride(0),
            query.stride(1),
            keys.stride(0),
            keys.stride(1),
            values.stride(0),
            values.stride(1),
            out.stride(0),
            out.stride(1),
            head_dim=head_dim,
            padded_dim=_next_power_of_two(head_dim),
            group_heads=num_heads // num_kv_heads,
            tile_queries=tile_queries,
            tile_rows=tile_rows,
            tile_keys=tile_keys,
            num_warps=4,
            enable_fp_fusion=True,
            num_stages=2,
        )
        return out

    def _tile(self, query: Tensor, keys: Tensor, values: Tensor) -> tuple[int, int, int]:
        """(rows, keys, query tokens) of a tile: a function of the model alone, never of the batch."""
        head_dim = query.shape[-1]
        if head_dim % 16 or not 0 < head_dim <= MAX_HEAD_DIM:
            raise ValueError(f"triton-paged takes a head_dim that is a multiple of 16 up to {MAX_HEAD_DIM}: {head_dim}")
        if keys.shape != values.shape or keys.shape[-1] != head_dim or query.shape[1] % keys.shape[0]:
            raise ValueError(f"query {query.shape}, keys {keys.shape} and values {values.shape} do not fit together")
        if {query.stride(-1), keys.stride(-1), values.stride(-1)} != {1}:
            raise ValueError("triton-paged needs the last dimension to be contiguous")
        if query.dtype not in _TILES or {keys.dtype, values.dtype} != {query.dtype}:
            raise ValueError(f"triton-paged takes float32 or bfloat16: {query.dtype}, {keys.dtype}, {values.dtype}")
        if not query.is_cuda and not self._interpreted:
            raise ValueError(f"triton-paged runs on CUDA, not on {query.device}")
        # Wide heads get fewer keys, so that two tiles in flight fit the 99 KiB of shared memory of the smaller GPUs.
        least_rows, tile_keys, widest = _TILES[query.dtype]
        if head_dim > widest:
            tile_keys //= 2
        group_heads = query.shape[1] // keys.shape[0]
        tile_rows = max(least_rows, _next_power_of_two(group_heads))
        return tile_rows, tile_keys, tile_rows // group_heads


def _next_power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
