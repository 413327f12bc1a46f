"""Loads a decoder's weights, from safetensors or GGUF files, into the model's own form: fused, and in one dtype.

What the files must hold was checked against their headers when they were described (``actorserve.model_files``); what
is read here is checked again, for a file may have changed since.
"""

import hashlib
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from safetensors import SafetensorError, safe_open
from torch import Tensor

from actorserve.errors import ModelError
from actorserve.model_files.description import DecoderConfig, ModelDescription
from actorserve.model_files.gguf_reader import GgufTensor, read_gguf
from actorserve.model_files.tensors import decoder_tensors
from workers.linear import Linear, linear_class
from workers.models.llama import Llama, LlamaLayer
from workers.models.rope import RotaryTable

_DEQUANTIZED_BYTES = 2**18  # at a time

Progress = Callable[[float], None]
"""Told the share of the work that is done, 0 to 1."""


class WeightSource(Protocol):
    """Tensors by their Hugging Face names, on the CPU, in whatever float type the file has."""

    def read(self, name: str) -> Tensor: ...


class SafetensorsSource:
    """One or several safetensors files, mapped into memory."""

    def __init__(self, files: Iterable[Path], stack: ExitStack) -> None:
        """The files stay open as long as ``stack``. Raises: ModelError."""
        self._places: dict[str, tuple[Path, Any]] = {}
        for file in files:
            try:
                opened = stack.enter_context(safe_open(file, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise ModelError(f"cannot read {file}: {error}") from None
            self._places |= dict.fromkeys(opened.keys(), (file, opened))

    def read(self, name: str) -> Tensor:
        if name not in self._places:
            raise ModelError(f"tensor {name} is missing")
        file, opened = self._places[name]
        try:
            tensor: Tensor = opened.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ModelError(f"cannot read tensor {name} from {file}: {error}") from None
        return tensor


class GgufSource:
    """A GGUF file; quantized tensors are dequantized to float32."""

    def __init__(self, file: Path, config: DecoderConfig) -> None:
        """Raises: ModelError."""
        self._file = file
        self._tensors = read_gguf(file).tensors
        self._names = {spec.hf_name: spec.gguf_name for spec in decoder_tensors(config)}
        self._heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}

    def read(self, name: str) -> Tensor:
        entry = self._tensors.get(self._names.get(name, name))
        if entry is None:
            raise ModelError(f"{self._file}: tensor {self._names.get(name, name)} is missing")
        values = torch.from_numpy(self._dequantized(entry))
        for projection, num_heads in self._heads.items():
            if f".{projection}." in name:
                return _halves(values, num_heads)
        return values

    def _dequantized(self, entry: GgufTensor) -> np.ndarray:
        try:
            raw = np.fromfile(self._file, np.uint8, entry.num_bytes, offset=entry.offset)
            if len(raw) < entry.num_bytes:
                raise ModelError(f"{self._file}: truncated within tensor {entry.name}")
            if entry.type == GGMLQuantizationType.F32:
                return raw.view(np.float32).reshape(entry.shape)
            return _dequantize(raw, entry.type).reshape(entry.shape)
        except NotImplementedError:
            raise ModelError(f"{self._file}: tensor {entry.name} has type {entry.type.name}, unsupported") from None
        except OSError as error:
            raise ModelError(f"cannot read {self._file}: {error.strerror}") from None


def _dequantize(raw: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
    """A tensor's blocks as float32 numbers, in order.

    The package goes through its input in groups of 16 rows, mostly in Python. Blocks do not know of rows, so it gets
    them in one row at a time, as many as stay in the cache.
    """
    _, bytes_per_block = GGML_QUANT_SIZES[kind]
    step = max(1, _DEQUANTIZED_BYTES // bytes_per_block) * bytes_per_block
    return np.concatenate([dequantize(raw[at : at + step], kind) for at in range(0, len(raw), step)])


def _halves(rows: Tensor, num_heads: int) -> Tensor:
    """GGUF files of this family turn neighbouring pairs (2i, 2i + 1) of a head; ours are (i, i + head_dim / 2)."""
    return rows.view(num_heads, -1, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def load_llama(
    description: ModelDescription, num_positions: int, dtype: torch.dtype, device: torch.device, progress: Progress
) -> Llama:
    """Read the weights and build the decoder on ``device``.

    Raises: ModelError, in one line that names the file or tensor at fault.
    """
    config = description.config
    if config.architecture != "llama":
        raise ModelError(f"{description.path}: unknown architecture {config.architecture}")
    with ExitStack() as stack:
        source: WeightSource
        if description.format == "gguf":
            source = GgufSource(description.weight_files[0], config)
        else:
            source = SafetensorsSource(description.weight_files, stack)
        return _Builder(description, source, dtype, device).build(num_positions, progress)


class _Builder:
    def __init__(
        self, description: ModelDescription, source: WeightSource, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._path = description.path
        self._config = description.config
        self._shapes = {spec.hf_name: spec.shape for spec in decoder_tensors(description.config)}
        self._source = source
        self._dtype = dtype
        self._device = device
        self._linear = linear_class(device, dtype)

    def build(self, num_positions: int, progress: Progress) -> Llama:
        config = self._config
        try:
            rotary = RotaryTable(config, num_positions, self._device)
        except (ArithmeticError, ValueError) as error:
            raise ModelError(f"{self._path}: RoPE cannot be computed: {error}") from None
        layers = []
        for number in range(config.num_layers):
            layers.append(self._layer(f"model.layers.{number}."))
            progress((number + 1) / (config.num_layers + 1))
        embedding = self._read("model.embed_tokens.weight")
        output = embedding if config.tie_word_embeddings else self._read("lm_head.weight")
        model = Llama(
            config,
            embedding,
            layers,
            self._read("model.norm.weight"),
            self._linear(output, None),
            rotary,
        )
        progress(1.0)
        return model

    def _layer(self, prefix: str) -> LlamaLayer:
        attention, mlp = (self._config.attention_bias, f"{prefix}self_attn."), (self._config.mlp_bias, f"{prefix}mlp.")

        def linear(block: tuple[bool, str], *names: str) -> Linear:
            biased, block_prefix = block
            weight = torch.cat([self._read(f"{block_prefix}{name}.weight") for name in names])
            bias = torch.cat([self._read(f"{block_prefix}{name}.bias") for name in names]) if biased else None
            return self._linear(weight, bias)

        return LlamaLayer(
            attention_norm=self._read(f"{prefix}input_layernorm.weight"),
            qkv=linear(attention, "q_proj", "k_proj", "v_proj"),
            attention_out=linear(attention, "o_proj"),
            mlp_norm=self._read(f"{prefix}post_attention_layernorm.weight"),
            gate_up=linear(mlp, "gate_proj", "up_proj"),
            down=linear(mlp, "down_proj"),
        )

    def _read(self, name: str) -> Tensor:
        tensor = self._source.read(name)
        if tuple(tensor.shape) != self._shapes[name]:
            raise ModelError(f"{self._path}: tensor {name} is {tuple(tensor.shape)}, not {self._shapes[name]}")
        if not tensor.is_floating_point():
            raise ModelError(f"{self._path}: tensor {name} holds {tensor.dtype}, not floats")
        return tensor.to(self._device, self._dtype).contiguous()


def weights_digest(description: ModelDescription) -> str:
    """SHA-256 of all weight files' bytes and the config (1.5 GB/s where the CPU has SHA instructions).

    Raises: ModelError if a file cannot be read.
    """
    digest = hashlib.sha256(repr(description.config).encode())
    for path in description.weight_files:
        try:
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
        except OSError as error:
            raise ModelError(f"cannot read {path}: {error.strerror}") from None
    return digest.hexdigest()
