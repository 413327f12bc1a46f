"""How much memory an engine may take: the KV pool's size at start.

On a CPU the pool is reserved whole, but its pages become resident only when they are first written. (It is shared
memory; the figures of the kernel and of its control groups count resident pages.) So the host's available memory does
not show what another worker will take later. Each worker therefore gets a share of what was free before any worker
started (``workers.memory_bytes``). A worker that starts again gets the same share.

The pool that KV is swapped out to always lies in the host's memory. For a GPU it is as large as the GPU's pool, but at
most a quarter of the worker's share of the host's. On a CPU there is none by default, because the same memory is worth
more as KV cache.
"""

import math
from dataclasses import dataclass

import pynvml
import torch

from actorserve.errors import SettingsError
from actorserve.host import available_memory_bytes, resident_memory
from actorserve.model_files.description import DecoderConfig, ModelDescription
from workers import native
from workers.devices import DriverError, usable_devices
from workers.engine_options import EngineOptions
from workers.kernels.choose import Kernels
from workers.kernels.linear import PackedLinear
from workers.kv.swap import STAGING_BYTES

_CPU_POOL_SHARE = 0.5  # of the memory without weights and activations; the rest is for page cache and other programs
_CUDA_POOL_SHARE = 0.9  # the rest is for the allocator's fragments and the kernels' own memory
# Of a GPU worker's share of the host's memory. The kernel can never take pinned memory back, not even for the files of
# weights that a restart reads, and pinning takes a second for a few GiB.
_HOST_POOL_SHARE = 0.25
_MIN_POOL_TOKENS = 2048  # fewer are too few to serve; a model of shorter context needs no more


def weights_bytes(description: ModelDescription, kernels: Kernels) -> int:
    """The least memory of the weights in the kernels' form, known before any weight is read.

    A token table that makes logits as well counts twice if the layer needs a form of its own.
    """
    mode = kernels.numerics
    total = 0.0
    for tensor in description.tensors:
        count = math.prod(tensor.shape)
        if tensor.name.endswith("embed_tokens.weight"):
            total += mode.embedding.itemsize * count
            if description.config.tie_word_embeddings and _copies_shared_table(kernels):
                total += _bytes_per_weight(mode.head_bits, kernels) * count
        else:
            bits = mode.head_bits if tensor.name == "lm_head.weight" else mode.weight_bits
            if tensor.packing is not None and kernels.runs_grouped:
                total += tensor.packing.bits / 8 * count
            else:
                total += _bytes_per_weight(bits, kernels) * count
    return int(total)


def activation_bytes(config: DecoderConfig, max_batch_tokens: int, max_batch_requests: int) -> int:
    """Roughly the memory of one iteration without weights and KV: a layer's inputs, and the rows of logits.

    It counts float32, twice the width of each input for temporaries, and six copies of the logits in the sampler.
    """
    attention = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    experts = config.experts_per_token * config.expert_intermediate_size
    row = 4 * config.hidden_size + 2 * attention + 4 * max(config.intermediate_size, experts)
    return 4 * (2 * max_batch_tokens * row + 6 * max_batch_requests * config.vocab_size)


def free_bytes(device: torch.device) -> int:
    """Free memory of ``device``: NVML's figure for a GPU, the host's and its control groups' for a CPU."""
    if device.type != "cuda":
        return available_memory_bytes()
    torch.cuda.empty_cache()  # give back what torch's allocator kept after loading
    try:
        devices = usable_devices()
        pynvml.nvmlInit()
    except (DriverError, pynvml.NVMLError):
        return torch.cuda.mem_get_info(device)[0]
    try:
        handle = pynvml.nvmlDeviceGetHandleByUUID(devices[device.index or 0].selector)
        return int(pynvml.nvmlDeviceGetMemoryInfo(handle).free)
    except (pynvml.NVMLError, IndexError):
        return torch.cuda.mem_get_info(device)[0]
    finally:
        pynvml.nvmlShutdown()


@dataclass(frozen=True, slots=True)
class MemoryNeeds:
    """What one engine needs: weights, one iteration's activations, KV of a token, and the longest context in tokens."""

    weights_bytes: int
    activation_bytes: int
    bytes_per_token: int
    context_tokens: int

    @property
    def least_pool_bytes(self) -> int:
        """The smallest KV pool that is worth serving with."""
        return min(_MIN_POOL_TOKENS, self.context_tokens) * self.bytes_per_token


class MemoryPlan:
    """Compares an engine's needs with the memory that there is, and sizes its KV pools. Make it before loading."""

    def __init__(self, device: torch.device, needs: MemoryNeeds, options: EngineOptions) -> None:
        """Only the sizes in bytes of ``options`` are used."""
        self._device = device
        self._needs = needs
        self._share_bytes = options.memory_bytes
        self._kv_cache_bytes = options.kv_cache_bytes
        self._host_kv_bytes = options.host_kv_bytes
        self._at_first = resident_memory()

    def check(self) -> None:
        """Call this before the weights are loaded.

        Raises: SettingsError if weights, activations and a small pool do not fit, or the pools of fixed size do not.
        """
        free = free_bytes(self._device)
        share = free if self._share_bytes is None or self._device.type == "cuda" else self._share_bytes
        # Memory that is taken at once must be free now. A pool of fixed size fills later, so it must fit the share:
        # a worker that starts again while memory is short then starts, and admits fewer requests.
        fixed, swapped = self._kv_cache_bytes, 0
        if self._device.type == "cuda":
            self._check_host()
        else:
            swapped = self._host_kv_bytes or 0
        least = min(self._needs.least_pool_bytes, fixed or self._needs.least_pool_bytes)
        if fixed is not None or swapped:
            self._require(fixed or least, share, "" if fixed else "at least ", swapped)
        self._require(least, min(free, share), "at least ")

    def pool_bytes(self) -> int:
        """The size of the KV pool. Call this after the weights are loaded.

        Raises: SettingsError if too little memory is left for a useful pool.
        """
        if self._kv_cache_bytes is not None:
            return self._kv_cache_bytes
        if self._device.type == "cuda":
            staging = 0 if self._host_kv_bytes == 0 else STAGING_BYTES
            left, share = free_bytes(self._device) - self._needs.activation_bytes - staging, _CUDA_POOL_SHARE
        else:
            now = resident_memory()
            # Mapped weights become resident only when they are read, and the kernel drops pages of weight files that
            # are not read any more. Neither may change the pool from one start to the next.
            written = now.private_bytes - self._at_first.private_bytes
            taken = self._at_first.total_bytes + max(written, self._needs.weights_bytes)
            limit = free_bytes(self._device) + now.total_bytes if self._share_bytes is None else self._share_bytes
            left = limit - taken - self._needs.activation_bytes - (self._host_kv_bytes or 0)
            share = _CPU_POOL_SHARE
        pool = int(share * left)
        if pool < self._needs.least_pool_bytes:
            raise SettingsError(
                f"too little memory on {self._device} for a KV cache: {_gib(max(0, left))} are left, "
                f"and {_gib(int(self._needs.least_pool_bytes / share))} are needed; {self._advice()}"
            )
        return pool

    def host_pool_bytes(self, pool_bytes: int) -> int:
        """The size of the pool that KV is swapped out to, for a KV pool of ``pool_bytes``; 0 for no such pool."""
        if self._host_kv_bytes is not None:
            return self._host_kv_bytes
        if self._device.type != "cuda":
            return 0
        return min(pool_bytes, int(_HOST_POOL_SHARE * self._host_share_bytes()))

    def _host_share_bytes(self) -> int:
        """How much of the host's memory a worker on a GPU may take now."""
        available = available_memory_bytes()
        return available if self._share_bytes is None else min(available, self._share_bytes)

    def _check_host(self) -> None:
        wanted, share = self._host_kv_bytes or 0, self._host_share_bytes()
        if wanted > share:
            raise SettingsError(
                f"too little memory on the host: {_gib(wanted)} are wanted for swapped KV, and there are {_gib(share)} "
                f"for this worker; change workers.host_kv_bytes or workers.count (fewer)"
            )

    def _require(self, pool_bytes: int, available_bytes: int, least: str, swapped_bytes: int = 0) -> None:
        weights, activations = self._needs.weights_bytes, self._needs.activation_bytes
        needed = weights + activations + pool_bytes + swapped_bytes
        if needed > available_bytes:
            swapped = f"KV swapped {_gib(swapped_bytes)}, " if swapped_bytes else ""
            raise SettingsError(
                f"too little memory on {self._device}: {_gib(needed)} are needed (weights {_gib(weights)}, "
                f"KV cache {least}{_gib(pool_bytes)}, {swapped}activations {_gib(activations)}), and there "
                f"are {_gib(available_bytes)}; {self._advice()}"
            )

    def _advice(self) -> str:
        settings = ["model.dtype (fewer bits)", "workers.max_batch_tokens"]
        if self._device.type == "cpu":
            settings.append("workers.count (fewer)")
        if self._share_bytes is not None and self._device.type == "cpu":
            settings.append("workers.memory_bytes")
        if self._kv_cache_bytes is not None:
            settings.append("workers.kv_cache_bytes")
        if self._host_kv_bytes and self._device.type == "cpu":
            settings.append("workers.host_kv_bytes")
        return f"change {', '.join(settings[:-1])} or {settings[-1]}"


def _copies_shared_table(kernels: Kernels) -> bool:
    """Whether the output layer that shares the token table keeps its numbers in a form of its own."""
    mode = kernels.numerics
    return mode.head_bits is not None or kernels.float_linear is PackedLinear


def _bytes_per_weight(bits: int | None, kernels: Kernels) -> float:
    """``bits``: the width of a quantized layer's weights; None for floats of the activations' dtype."""
    if bits is None:
        return kernels.numerics.activations.itemsize
    packed = 1.0 if bits == 8 else 0.5 + 1 / 16  # 16 weights of 4 bits share a byte
    if kernels.native:
        return packed
    return packed + (1 if native.has_vnni() else 4)  # torch's own product keeps an unpacked copy


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"
