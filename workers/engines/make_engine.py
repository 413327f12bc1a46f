"""The engine that the settings ask for."""

from dataclasses import replace
from pathlib import Path

from actorserve.model_files.describe import describe
from actorserve.model_files.grammars import compiler_for
from actorserve.processes.child import Child
from actorserve.settings import Settings
from workers.engine import Engine
from workers.engine_options import EngineOptions
from workers.engines.fake_engine import BYTES_PER_TOKEN, FAKE_MODEL, FakeEngine
from workers.weights.file_digest import weights_digest

_FAKE_STEP_S = 0.005  # long enough for tests to act in the middle of a request
_FAKE_NUM_TOKENS = 4096  # of the fake engine's KV, if the settings name no size


def load_engine(child: Child) -> Engine:
    """Load the model that ``child.settings`` name, and report progress.

    Raises: ModelError if the model cannot be served; SettingsError if the settings do not fit it or this machine.
    """
    settings = child.settings
    workers = settings.workers
    description = describe(Path(settings.model.path), settings.model.load_format)
    description = replace(description, name=settings.model.name or description.name)
    if workers.engine == "fake":
        block_bytes = BYTES_PER_TOKEN * workers.tokens_per_block
        return FakeEngine(
            replace(FAKE_MODEL, name=description.name, vocab_size=description.config.vocab_size),
            num_blocks=max(1, (workers.kv_cache_bytes or _FAKE_NUM_TOKENS * BYTES_PER_TOKEN) // block_bytes),
            num_host_blocks=(_host_kv_bytes(settings) or 0) // block_bytes,
            tokens_per_block=workers.tokens_per_block,
            step_s=_FAKE_STEP_S,
            make_compiler=lambda: compiler_for(description),
            eos_ids=description.eos_token_ids,
            weights_digest=weights_digest(description),
        )
    child.status.loading("importing torch")
    from workers import native
    from workers.engines.torch_engine import TorchEngine

    if workers.device == "cpu":
        child.status.loading("finding the native kernels (the first start builds them)")
        native.load()
    return TorchEngine(description, engine_options(settings), child.status.loading)


def engine_options(settings: Settings) -> EngineOptions:
    """What resolved settings ask of an engine that computes."""
    workers = settings.workers
    limits = workers.batch_limits()
    return EngineOptions(
        device="cpu" if workers.device == "cpu" else "cuda",
        dtype=settings.model.dtype,
        num_threads=workers.threads or 1,
        tokens_per_block=workers.tokens_per_block,
        max_context_tokens=workers.max_context_tokens,
        max_batch_requests=limits.requests,
        max_batch_tokens=limits.tokens,
        memory_bytes=workers.memory_bytes,
        kv_cache_bytes=workers.kv_cache_bytes,
        host_kv_bytes=_host_kv_bytes(settings),
    )


def _host_kv_bytes(settings: Settings) -> int | None:
    """0 if KV is never swapped out."""
    return 0 if settings.workers.swap == "recompute" else settings.workers.host_kv_bytes
