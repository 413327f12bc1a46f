"""Builds the decoder that a description names."""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

from actorserve.errors import ModelError
from actorserve.model_files.description import ModelDescription
from workers.kernels.choose import Kernels
from workers.models.decoder import Decoder
from workers.models.gemma3 import Gemma3
from workers.models.llama import Llama
from workers.models.mixtral import Mixtral
from workers.models.opt import Opt
from workers.models.qwen3 import Qwen3
from workers.models.qwen3_moe import Qwen3Moe
from workers.weights.decoder_weights import Progress, Weights
from workers.weights.sources import DummySource, GgufSource, SafetensorsSource, WeightSource
from workers.weights.store import WeightStore

_DECODERS: dict[str, Callable[[Weights, int], Decoder]] = {
    "llama": Llama,
    "qwen3": Qwen3,
    "qwen3_moe": Qwen3Moe,
    "mixtral": Mixtral,
    "gemma3": Gemma3,
    "opt": Opt,
}


def load_model(
    description: ModelDescription, num_positions: int, kernels: Kernels, store: WeightStore, progress: Progress
) -> Decoder:
    """Read the weights and build the decoder, for contexts of up to ``num_positions`` tokens.

    Raises: ModelError, in one line that names the file or tensor.
    """
    with ExitStack() as stack:
        weights = Weights(description, partial(_source, description, stack), store, kernels, progress)
        return make_decoder(weights, num_positions)


def make_decoder(weights: Weights, num_positions: int) -> Decoder:
    """The decoder that ``weights`` are for. Raises: ModelError as `load_model`."""
    make = _DECODERS.get(weights.config.architecture)
    if make is None:
        raise ModelError(f"{weights.path}: unknown architecture {weights.config.architecture}")
    return make(weights, num_positions)


def _source(description: ModelDescription, stack: ExitStack) -> WeightSource:
    if description.format == "gguf":
        return GgufSource(description.weight_files[0], stack)
    if description.format == "dummy":
        return DummySource()
    return SafetensorsSource(description.weight_files, stack)
