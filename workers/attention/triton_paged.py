"""Paged attention on CUDA with Triton kernels (``workers.attention.triton_kernel``).

The keys of a request are cut at multiples of 256 positions, and each split is one unit of summing. A request that feeds
one token (decode) has a program for each split and key head, so that a long context fills the GPU at batch 1; a second
kernel folds the splits in ascending order. A request that feeds several tokens (prefill) folds the same splits in the
same way within one program. So a query's result has the same bits alone, within a chunk or in a batch, and for any
block size.

Decode and prefill must multiply with the same instruction, because instructions may round differently inside. Triton
takes a GPU's widest instruction for tiles of at least 64 rows with 4 warps for each 64: ``wgmma`` on sm_90 and
``tcgen05.mma`` on sm_100; elsewhere it is ``mma.sync`` for any tile. So decode, too, has 64 rows, most of which are
padding. By arithmetic that costs decode no time: each number of keys and values is multiplied 64 times, and tensor
cores multiply 2 to 5 times as often while the memory delivers one. The other choice, ``mma.sync`` with 16 rows in
both, would lose about a third of prefill's rate on sm_90. Prefill tiles have 128 rows. On the GPU,
`TritonPagedAttention.try_out` compares the bits of both before the model is loaded.

Folding costs prefill a second set of sums in registers, and about 6 % more instructions. No GPU has measured it yet.
"""

import importlib
import os
import subprocess
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from actorserve.errors import SettingsError
from actorserve.model_files.description import DecoderConfig
from workers.batch import IntArray
from workers.kernels.gpu import gpu_of

MAX_HEAD_DIM = 256
SPLIT_KEYS = 256
"""Keys of a split. Fewer keys fill the GPU at shorter contexts, and cost prefill and merging more."""

_NO_WINDOW = 2**30  # longer than any context, and far below int32's limit
_SCRATCH_BYTES = 2**27  # for the splits of one layer; two million tokens of context for 32 heads of 128
_REQUESTS_AT_ONCE = 128  # whose lengths a program reads together
_PROGRAMS_PER_PROCESSOR = 2  # that registers and shared memory have room for
_LOADS_AHEAD = 6  # of a merge
_STAGES = 3  # keys and values are loaded two tiles ahead
_WIDE_SHARED_BYTES = 128 * 1024  # which that needs for heads wider than 128


@dataclass(frozen=True, slots=True)
class Tile:
    """``rows``: queries times heads of a group. ``keys`` enter the online softmax together."""

    rows: int
    keys: int
    warps: int


@dataclass(frozen=True, slots=True)
class Tiles:
    """``prefill`` begins with the fastest. Each gives the bits of ``decode``, or is left out by the trial."""

    decode: Tile
    prefill: tuple[Tile, ...]


class PagedBatch(Protocol):
    """What the kernels read of a ``workers.batch.Batch`` (tensors int32, on the device; R requests).

    The host's numbers choose kernels, and no result depends on them. A captured graph needs ``host_query_lens`` as in
    every replay, and in no replay may ``TritonPagedAttention.has_room`` be False.
    """

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
        """[R, max_blocks]: a request's blocks in order of position. Any strides, because layer groups may share it."""
        ...

    @property
    def tokens_per_block(self) -> int: ...

    @property
    def host_query_lens(self) -> IntArray:
        """[R]: tokens that each request feeds."""
        ...

    @property
    def host_context_lens(self) -> IntArray:
        """[R]: as ``context_lens``."""
        ...


class _OneRequest:
    """A batch of the last tokens of one request (``PagedBatch``); all blocks are in order."""

    tokens_per_block = 16

    def __init__(self, num_queries: int, context_len: int, device: torch.device) -> None:
        def put(*numbers: int) -> Tensor:
            return torch.tensor(numbers, dtype=torch.int32, device=device)

        self.query_starts = put(0, num_queries)
        self.context_lens = put(context_len)
        self.block_tables = put(*range(-(-context_len // self.tokens_per_block))).view(1, -1)
        self.host_query_lens = np.array([num_queries])
        self.host_context_lens = np.array([context_len])


class TritonPagedAttention:
    """The backend; see ``workers.attention`` for the protocol.

    float32 inputs are multiplied in IEEE float32 (no TF32). bfloat16 and float16 inputs use the tensor cores, with
    float32 sums and softmax, and weights rounded to the inputs' type.
    """

    reads_whole_blocks = False
    keys_transposed = False

    def __init__(self, scale: float) -> None:
        """``scale``: the factor of scores, above 0. Raises: SettingsError if Triton cannot be imported."""
        self._scale = scale * 1.4426950408889634  # scores in units of log2
        try:
            self._kernels: Any = importlib.import_module("workers.attention.triton_kernel")
        except ImportError as error:
            raise SettingsError(f"attention by triton-paged needs the package triton: {error}") from error
        self._interpreted = os.environ.get("TRITON_INTERPRET") == "1"
        self._num_prefill_tiles_refused = 0
        self._scratch: Tensor | None = None

    @property
    def name(self) -> str:
        # Split, tiles and the compiler decide bits; the tiles are a function of the model and of what the trial found.
        return f"triton-paged triton={version('triton')} split={SPLIT_KEYS} tile={self._num_prefill_tiles_refused}"

    def try_out(self, config: DecoderConfig, dtype: torch.dtype, device: torch.device) -> None:
        """Compile the kernels for a model's shapes, and take the first prefill tile that has the bits of decode. Run
        before the model is loaded.

        Raises: SettingsError that says what is missing, or that this GPU computes prefill and decode differently.
        """
        try:
            self._compare(config, dtype, device)
        except (RuntimeError, OSError, subprocess.SubprocessError) as error:
            said = str(error).strip().splitlines() or [type(error).__name__]
            raise SettingsError(
                f"Triton cannot build its kernels here, for which it needs gcc and Python's headers "
                f"(apt install gcc python3-dev): {said[-1]}"
            ) from error

    def _compare(self, config: DecoderConfig, dtype: torch.dtype, device: torch.device) -> None:
        context_len = SPLIT_KEYS + 40  # two splits, and the second has a tile that is not full
        generator = torch.Generator().manual_seed(0)

        def random(num_heads: int, num_tokens: int) -> Tensor:
            numbers = torch.randn((num_heads, num_tokens, config.head_dim), generator=generator)
            return numbers.to(device, dtype)

        keys, values = (random(config.num_kv_heads, context_len + 16) for _ in range(2))
        query = random(config.num_heads, 3).transpose(0, 1).contiguous()
        # float32 results, because rounding to fewer bits would hide differences.
        decoded = torch.cat(
            [
                self._attend(query[at : at + 1], keys, values, _OneRequest(1, context_len - 2 + at, device), None, True)
                for at in range(len(query))
            ]
        )
        for refused in range(len(self._tiles_for(query, keys, values).prefill)):
            self._num_prefill_tiles_refused = refused
            together = self._attend(query, keys, values, _OneRequest(len(query), context_len, device), None, True)
            if torch.equal(together, decoded):
                break
        else:
            raise SettingsError(
                "Triton's attention computes other bits in prefill than in decode on this GPU; no tile agrees"
            )
        self(query[:1], keys, values, _OneRequest(1, 1, device))
        self(query, keys, values, _OneRequest(len(query), context_len, device)).sum().item()  # waits for the kernels

    def __call__(
        self, query: Tensor, keys: Tensor, values: Tensor, batch: PagedBatch, window: int | None = None
    ) -> Tensor:
        """Causal attention of this step's tokens over their requests' contexts.

        ``query``: [T, num_heads, head_dim]; ``keys``, ``values``: [num_kv_heads, num_slots, head_dim], already with
        this step's tokens; only the last dimension must be contiguous. With a ``window`` a token at position
        p sees the keys from p - window + 1 to p.

        Returns: [T, num_heads, head_dim] in the query's dtype. Raises: ValueError for shapes, types or devices that
        the kernels do not take.
        """
        return self._attend(query, keys, values, batch, window, in_float32=False)

    def has_room(self, num_heads: int, head_dim: int, context_lens: IntArray) -> bool:
        """Whether the scratch memory holds the splits of requests with these contexts. If not, a program folds all
        splits of a request in decode, too: the same bits, but slower if few contexts are much longer than others."""
        num_splits = int((-(-context_lens // SPLIT_KEYS)).sum())
        return num_splits * num_heads * (head_dim + 2) * 4 <= _SCRATCH_BYTES

    def _attend(
        self, query: Tensor, keys: Tensor, values: Tensor, batch: PagedBatch, window: int | None, in_float32: bool
    ) -> Tensor:
        tiles = self._tiles_for(query, keys, values)
        num_tokens, num_heads, head_dim = query.shape
        out = torch.empty_like(query, dtype=torch.float32 if in_float32 else None)
        if num_tokens == 0:
            return out
        seen = _NO_WINDOW if window is None else min(window, _NO_WINDOW)
        inputs, of_requests = (query, keys, values), (batch.query_starts, batch.context_lens, batch.block_tables)
        of_step = (len(batch.context_lens), batch.block_tables.stride(0), self._scale, seen)
        in_strides = tuple(stride for tensor in inputs for stride in tensor.stride()[:2])
        constants = {
            "head_dim": head_dim,
            "padded_dim": _next_power_of_two(head_dim),
            "group_heads": num_heads // len(keys),
            "split_keys": SPLIT_KEYS,
            "tokens_per_block": batch.tokens_per_block,
            "table_step": batch.block_tables.stride(1),
            "num_stages": _STAGES if head_dim <= 128 or gpu_of(out.device).shared_bytes >= _WIDE_SHARED_BYTES else 2,
            "enable_fp_fusion": False,
        }
        num_decodes = int((batch.host_query_lens == 1).sum())
        splits_decode = num_decodes > 0 and self.has_room(num_heads, head_dim, batch.host_context_lens)
        if splits_decode:
            self._decode(tiles.decode, inputs, of_requests, of_step, in_strides, constants, out)
        if not splits_decode or num_decodes < len(batch.host_query_lens):
            tile = tiles.prefill[self._num_prefill_tiles_refused]
            tile_queries = tile.rows // constants["group_heads"]
            # An upper bound of the number of tiles: reading the lengths would wait for the device.
            num_tiles = num_tokens // tile_queries + len(batch.context_lens)
            self._kernels.prefill[(num_tiles, len(keys))](
                *inputs,
                out,
                *of_requests,
                *of_step,
                2 if splits_decode else 1,
                *in_strides,
                *out.stride()[:2],
                tile_queries=tile_queries,
                tile_rows=tile.rows,
                tile_keys=tile.keys,
                num_warps=tile.warps,
                **constants,
            )
        return out

    def _decode(
        self,
        tile: Tile,
        inputs: tuple[Tensor, ...],
        of_requests: tuple[Tensor, ...],
        of_step: tuple[Any, ...],
        in_strides: tuple[int, ...],
        constants: dict[str, Any],
        out: Tensor,
    ) -> None:
        """The tokens of the requests that feed one token, into ``out``."""
        num_heads, num_kv_heads, num_requests = inputs[0].shape[1], len(inputs[1]), of_step[0]
        sums, stats, first_items = self._scratch_of(num_heads, constants["head_dim"], num_requests, out.device)
        num_programs = -(-_PROGRAMS_PER_PROCESSOR * gpu_of(out.device).processors // num_kv_heads)
        self._kernels.decode_splits[(num_programs, num_kv_heads)](
            *inputs,
            sums,
            stats,
            first_items,
            *of_requests,
            *of_step,
            *in_strides,
            num_heads=num_heads,
            tile_rows=tile.rows,
            tile_keys=tile.keys,
            requests_at_once=_REQUESTS_AT_ONCE,
            num_warps=tile.warps,
            **constants,
        )
        self._kernels.decode_merge[(num_requests, num_heads)](
            sums,
            stats,
            first_items,
            out,
            *of_requests[:2],
            num_requests,
            of_step[-1],
            *out.stride()[:2],
            num_heads=num_heads,
            head_dim=constants["head_dim"],
            padded_dim=constants["padded_dim"],
            split_keys=SPLIT_KEYS,
            loads_ahead=_LOADS_AHEAD,
            num_warps=1,
            enable_fp_fusion=False,
        )

    def _scratch_of(
        self, num_heads: int, head_dim: int, num_requests: int, device: torch.device
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The memory of all layers' splits, one layer after another, allocated once: sums, statistics, first items."""
        if self._scratch is None or self._scratch.device != device:
            self._scratch = torch.empty(_SCRATCH_BYTES // 4, dtype=torch.float32, device=device)
        num_splits = len(self._scratch) // (num_heads * (head_dim + 2))
        sums = self._scratch[: num_splits * num_heads * head_dim]
        stats = self._scratch[len(sums) : len(sums) + num_splits * num_heads * 2]
        return sums, stats, torch.empty(num_requests, dtype=torch.int32, device=device)

    def _tiles_for(self, query: Tensor, keys: Tensor, values: Tensor) -> Tiles:
        """A function of the model alone, never of the batch. Raises: ValueError."""
        head_dim = query.shape[-1]
        if head_dim % 16 or not 0 < head_dim <= MAX_HEAD_DIM:
            raise ValueError(f"triton-paged takes a head_dim that is a multiple of 16 up to {MAX_HEAD_DIM}: {head_dim}")
        if keys.shape != values.shape or keys.shape[-1] != head_dim or query.shape[1] % keys.shape[0]:
            raise ValueError(f"query {query.shape}, keys {keys.shape} and values {values.shape} do not fit together")
        if {query.stride(-1), keys.stride(-1), values.stride(-1)} != {1}:
            raise ValueError("triton-paged needs the last dimension to be contiguous")
        if query.dtype not in (torch.float32, torch.bfloat16, torch.float16) or {keys.dtype, values.dtype} != {
            query.dtype
        }:
            raise ValueError(
                f"triton-paged takes float32, bfloat16 or float16: {query.dtype}, {keys.dtype}, {values.dtype}"
            )
        if query.device.type == "cpu" and not self._interpreted:
            raise ValueError(f"triton-paged runs on CUDA, not on {query.device}")
        return tiles_for(query.dtype, head_dim, query.shape[1] // keys.shape[0])


def tiles_for(dtype: torch.dtype, head_dim: int, group_heads: int) -> Tiles:
    """The tiles of a model's attention. Decode and prefill have the same ``keys``, because their number decides bits.

    Wide heads have half as many keys, so that two tiles in flight fit the 99 KiB of shared memory of the smaller GPUs.
    """
    heads = _next_power_of_two(group_heads)
    if dtype == torch.float32:  # does not use tensor cores, and larger tiles would only spill registers
        tile = Tile(max(16, heads), 32 if head_dim <= 64 else 16, 8)
        return Tiles(tile, (tile,))
    if head_dim > 128:
        tile = Tile(max(64, heads), 32, 8)
        return Tiles(tile, (tile,))
    decode = Tile(max(64, heads), 64, max(4, heads // 16))
    return Tiles(decode, tuple(dict.fromkeys((Tile(max(128, heads), 64, max(8, heads // 16)), decode))))


def _next_power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
