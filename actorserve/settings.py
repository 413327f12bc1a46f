"""A server's settings: defaults, a TOML file over them, and command-line options over that.

``config/actorserve.toml`` shows every setting with its default. Unknown names are errors, so a misspelt setting is
found at start. Units stand in the names. What a simulated cluster has as well is in ``actorserve.options``.
"""

import shlex
import tempfile
import tomllib
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from actorserve.errors import SettingsError
from actorserve.options import (
    MAX_WORKERS,
    ClusterOptions,
    MigrationOptions,
    Period,
    ScalingOptions,
    SchedulingOptions,
)


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="constants")


class HttpSettings(_Section):
    """What clients talk to."""

    host: str = Field("127.0.0.1", description="the address on which the gateway listens")
    port: int = Field(8000, ge=0, le=65535, description="the port on which the gateway listens; 0: a free one")
    api_keys_file: Path | None = Field(None, description="a file of API keys; default: no key is needed")
    max_body_bytes: int = Field(8 * 2**20, ge=1024, description="the longest body of an HTTP request")
    max_open_requests: int = Field(
        4096, ge=1, description="most choices that are being answered at once; more are refused as overload"
    )
    max_choices: int = Field(16, ge=1, description="the largest `n` that a request may ask for")
    max_stop_strings: int = Field(16, ge=1, description="most stop strings of one request")
    max_stop_chars: int = Field(256, ge=1, description="characters of the longest stop string")
    max_top_logprobs: int = Field(20, ge=0, description="the largest `top_logprobs` that a request may ask for")
    keep_alive_s: float = Field(
        15.0, gt=0, description="a stream that has been silent for this time gets a comment, so that proxies keep it"
    )
    template_timeout_s: float = Field(5.0, gt=0, description="longest time that rendering a chat template may take")


class ModelSettings(_Section):
    """What is served."""

    path: str = Field("default", description="`default`, a GGUF file, or a Hugging Face folder")
    name: str | None = Field(None, description="the name that clients ask for; default: the model's own")
    load_format: Literal["auto", "dummy"] = Field(
        "auto", description="auto: the model's weights; dummy: random weights, for measuring"
    )
    dtype: Literal["auto", "int8", "int4", "float32", "bfloat16"] = Field(
        "auto", description="numbers that workers compute with; auto: int8 on CPUs, bfloat16 on GPUs"
    )


class WorkerSettings(SchedulingOptions, _Section):
    """One engine per worker process."""

    count: int | None = Field(
        None, ge=1, le=MAX_WORKERS, description="number of workers; default: one per GPU, or two without a GPU"
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="where workers compute; auto: on GPUs if there are any"
    )
    engine: Literal["torch", "fake"] = Field("torch", description="fake: tokens without meaning, for tests")
    threads: int | None = Field(
        None, ge=1, description="CPU threads of each worker; default: an equal share of the cores"
    )
    memory_bytes: int | None = Field(
        None, ge=1, description="all memory of each CPU worker; default: an equal share of what is available"
    )
    kv_cache_bytes: int | None = Field(
        None, ge=1, description="KV cache of each worker; default: part of the memory that weights and computing leave"
    )
    host_kv_bytes: int | None = Field(
        None, ge=0, description="host memory of each worker that KV is swapped to; 0: none; default: none on CPUs"
    )
    max_context_tokens: int | None = Field(
        None, ge=2, description="prompt and output tokens of the longest request; default: the model's own limit"
    )
    policy: Literal["skip_join_mlfq", "fcfs", "naive_mlfq", "fixed_priority", "srpt"] = Field(
        "skip_join_mlfq", description="the order of requests on a worker"
    )
    profile: Path | None = Field(
        None, description="file of iteration times; default: measured at the first start, and kept in the cache"
    )


class ClusterSettings(ClusterOptions, _Section):
    """How processes find and watch each other. All sockets lie in ``runtime_dir``, which only its owner may enter."""

    runtime_dir: Path | None = Field(None, description="folder of the sockets; default: a fresh private folder")
    heartbeat_s: Period = Field(0.25, description="time between two signs of life of a process")
    drain_timeout_s: float = Field(
        30.0, gt=0, description="time that running requests have to finish when the server is told to stop"
    )
    journal_dir: Path | None = Field(
        None, description="folder in which each process records what its core is told; default: nothing is recorded"
    )


class MigrationSettings(MigrationOptions, _Section):
    """Migration between real workers."""

    @model_validator(mode="after")
    def _check_pace(self) -> Self:
        if self.bytes_per_s is not None and self.bytes_per_s < 2**20:
            raise ValueError(f"bytes_per_s is {self.bytes_per_s:g}: expected at least {2**20}")
        return self


class ScalingSettings(ScalingOptions, _Section):
    """What starts and stops workers."""

    start_with: Literal["processes", "systemd", "command"] = Field(
        "processes", description="what starts a worker: this server on this machine, systemd, or a command"
    )
    unit: str = Field(
        "actorserve-worker@{number}.service", description="the systemd unit of worker {number}, for systemd"
    )
    command: str | None = Field(None, description="a command line that starts a worker; default: none")

    @property
    def command_words(self) -> list[str]:
        """The command, taken apart as a shell does."""
        return shlex.split(self.command or "")

    @model_validator(mode="after")
    def _check_starts(self) -> Self:
        if self.start_with == "systemd" and "{number}" not in self.unit:
            raise ValueError(f"unit is {self.unit}: expected {{number}} in it, which tells the units apart")
        try:
            has_command = bool(self.command_words)
        except ValueError as error:
            raise ValueError(f"command is {self.command}: {error}") from None
        if self.start_with == "command" and not has_command:
            raise ValueError("start_with is command: expected a command as well")
        return self


class SupervisionSettings(_Section):
    """A process that fails is restarted after a pause that doubles each time."""

    max_restarts: int = Field(5, ge=0, description="the server ends when a process fails more often within window_s")
    window_s: float = Field(60.0, gt=0, description="time in which max_restarts failures count")
    backoff_s: float = Field(0.2, gt=0, description="pause before the first restart")
    max_backoff_s: float = Field(10.0, gt=0, description="longest pause before a restart")


class Settings(_Section):
    """All sections of the file."""

    http: HttpSettings = HttpSettings()
    model: ModelSettings = ModelSettings()
    workers: WorkerSettings = WorkerSettings()
    cluster: ClusterSettings = ClusterSettings()
    migration: MigrationSettings = MigrationSettings()
    scaling: ScalingSettings = ScalingSettings()
    supervision: SupervisionSettings = SupervisionSettings()

    @property
    def num_workers(self) -> int:
        """How many workers the start brings up; 0 while ``workers.count`` is not resolved."""
        return self.workers.count or 0


def load_settings(file: Path | None, overrides: dict[str, dict[str, Any]] | None = None) -> Settings:
    """Read ``file`` (TOML) and lay ``overrides`` (section -> name -> value; None values are skipped) over it.

    Raises: SettingsError, in one line that names the file and each wrong setting.
    """
    values: dict[str, Any] = {}
    if file is not None:
        try:
            values = tomllib.loads(file.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise SettingsError(f"cannot read settings from {file}: {error}") from None
    for section, names in (overrides or {}).items():
        given = {name: value for name, value in names.items() if value is not None}
        if given:
            values.setdefault(section, {})
            if isinstance(values[section], dict):
                values[section] |= given
    try:
        return Settings.model_validate(values)
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()[:10])
        raise SettingsError(f"{file or 'settings'}: {problems}") from None


def make_runtime_dir() -> Path:
    """A fresh folder for sockets that only its owner may enter (0700), with a short path (sun_path holds 107 bytes)."""
    return Path(tempfile.mkdtemp(prefix="actorserve-"))
