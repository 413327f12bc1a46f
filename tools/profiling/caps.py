"""``tools/profile --caps``: what power caps cost on this GPU."""

import os

from actorserve.core.timing.profile import CapSweep
from tools.profiling.errors import NoCapsError
from workers.engine import Engine
from workers.power.nvml import Gpus, open_gpus
from workers.profile.cap_sweep import CapsError, sweep_caps
from workers.profile.engine_timer import EngineTimer, Shape

_CONTEXT_TOKENS = 512


def open_gpu(device: str) -> tuple[Gpus, str]:
    """The driver, and the name of the one GPU that this process computes on. Raises: NoCapsError."""
    if device != "cuda":
        raise NoCapsError("--caps needs a GPU, because the power of CPUs cannot be capped")
    gpus, name = open_gpus(), os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if isinstance(gpus, str):
        raise NoCapsError(f"no power can be read or capped here: {gpus}")
    return gpus, name


def measure_caps(
    engine: Engine, gpus: Gpus, device: str, hardware: str, max_tokens: int, max_requests: int
) -> CapSweep:
    """Times and power under caps, of the largest prompt's iteration and of that of the most decodes.

    Raises: NoCapsError.
    """
    context = min(_CONTEXT_TOKENS, engine.model.max_tokens // 2) // engine.tokens_per_block * engine.tokens_per_block
    prompt, token = Shape(max_tokens, 0, 0, 0), Shape(0, 0, max_requests, context)
    with EngineTimer(engine, [prompt, token]) as timer:
        try:
            return sweep_caps(
                gpus,
                device,
                f"measured on {hardware}",
                lambda: timer.iteration_s(prompt),
                lambda: timer.iteration_s(token),
            )
        except CapsError as error:
            raise NoCapsError(str(error)) from None
