"""All settings, in one place: defaults here, a TOML file over them, command-line options over that.

``config/actorserve.toml`` shows every setting with its default. Unknown names are errors, so a misspelt setting is
found at start. Units stand in the names.
"""

import shlex
import tempfile
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from actorserve.core.scheduling.token_budget import MIN_PREFILL_TOKENS
from actorserve.errors import SettingsError


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="constants")


class HttpSettings(_Section):
    """The gateway's HTTP face."""

    host: str = "127.0.0.1"
    port: int = Field(8000, ge=0, le=65535)
    api_keys_file: Path | None = Field(None, description="who may ask; default: everybody")
    max_body_bytes: int = Field(8 * 2**20, ge=1024)
    max_open_requests: int = Field(4096, ge=1, description="choices being answered; more are refused as overload")
    max_choices: int = Field(16, ge=1, description="upper bound of `n`")
    max_stop_strings: int = Field(16, ge=1)
    max_stop_chars: int = Field(256, ge=1, description="of one stop string")
    max_top_logprobs: int = Field(20, ge=0)
    keep_alive_s: float = Field(15.0, gt=0, description="silence after which a stream gets a comment")
    template_timeout_s: float = Field(5.0, gt=0)


class ModelSettings(_Section):
    """What is served. ``path`` is `default`, a GGUF file, or a Hugging Face folder."""

    path: str = "default"
    name: str | None = Field(None, description="the name clients ask for; else the model's own")
    load_format: Literal["auto", "dummy"] = Field("auto", description="dummy: random weights, for measuring")
    dtype: Literal["auto", "int8", "int4", "float32", "bfloat16"] = "auto"


class WorkerSettings(_Section):
    """One engine per worker process."""

    count: int | None = Field(None, ge=1, le=1024, description="default: one per GPU, else two")
    device: Literal["auto", "cpu", "cuda"] = "auto"
    engine: Literal["torch", "fake"] = "torch"
    threads: int | None = Field(None, ge=1, description="CPU threads per worker; default: the cores shared out")
    memory_bytes: int | None = Field(None, ge=1, description="of a CPU worker in all; default: what is free shared out")
    kv_cache_bytes: int | None = Field(None, ge=1, description="default: from the free memory")
    host_kv_bytes: int | None = Field(None, ge=0, description="that KV is swapped to; 0: none")
    tokens_per_block: int = Field(16, ge=1, le=1024)
    max_batch_requests: int = Field(64, ge=1)
    max_batch_tokens: int = Field(512, ge=1, description="prefill and decode tokens of one iteration")
    tpot_target_s: float = Field(0.1, gt=0, description="prefills leave decodes this time for a token; inf: no target")
    max_context_tokens: int | None = Field(None, ge=2, description="default: the model's own")
    prefix_cache: bool = Field(True, description="keep the KV of prompts for others that begin alike")
    policy: Literal["skip_join_mlfq", "fcfs", "naive_mlfq", "fixed_priority", "srpt"] = "skip_join_mlfq"
    promote_after_s: float = Field(0.3, gt=0, description="a request that waited so long comes first; inf: never")
    promote_after_by_priority_s: dict[int, Annotated[float, Field(gt=0)]] = Field({}, description="where it differs")
    min_share: float = Field(0.1, ge=0, lt=1, description="that requests of lower priority keep of the computing")
    swap: Literal["proactive", "reactive", "recompute"] = "proactive"
    max_waiting_requests: int = Field(64, ge=1, description="placed here and not begun; more wait in the cluster")
    headroom_tokens_by_priority: dict[int, Annotated[int, Field(ge=0)]] = Field({}, description="kept free beside them")
    profile: Path | None = Field(None, description="default: measured at the first start, and kept in the cache")

    @model_validator(mode="after")
    def _leave_room_for_prefills(self) -> Self:
        least = self.max_batch_requests + MIN_PREFILL_TOKENS
        if self.max_batch_tokens < least:
            raise ValueError(
                f"max_batch_tokens is {self.max_batch_tokens}, and must be at least max_batch_requests + "
                f"{MIN_PREFILL_TOKENS} = {least}, so that prompts enter beside a full batch"
            )
        return self


class ClusterSettings(_Section):
    """How processes find and watch each other. All sockets lie in ``runtime_dir``, which only its owner may enter."""

    runtime_dir: Path | None = Field(None, description="default: a fresh private folder")
    heartbeat_s: float = Field(0.25, gt=0)
    death_after_s: float = Field(2.0, gt=0, description="silence that counts as death")
    load_report_s: float = Field(0.2, gt=0)
    retry_s: float = Field(1.0, gt=0, description="after which an unanswered message is sent again")
    max_waiting_requests: int = Field(2048, ge=1, description="placed nowhere yet; more are refused")
    dispatch: Literal["freeness", "least_loaded", "round_robin"] = "freeness"
    late_binding: bool = Field(True, description="requests wait in the cluster until a worker has room")
    round_s: float = Field(0.25, gt=0, description="migration and scaling are decided this often")
    no_instance_timeout_s: float = Field(30.0, gt=0, description="a new request without an instance ends after it")
    resume_timeout_s: float = Field(600.0, gt=0, description="the same for one whose client has part of the answer")
    drain_timeout_s: float = Field(30.0, gt=0)
    journal_dir: Path | None = Field(None, description="record what each process's core is told, to replay a failure")


class MigrationSettings(_Section):
    """Who moves requests to whom. Bounds are of freeness, in iterations: how many tokens each request can still get."""

    enabled: bool = True
    source_below: float = Field(32.0, description="a worker under it sends")
    source_until: float = Field(64.0, description="until it is over this")
    destination_above: float = Field(128.0, description="a worker over it may receive")
    rest_s: float = Field(2.0, gt=0, description="for which who took part does not change sides")
    max_moves: int = Field(64, ge=1, description="pairs of workers at once")
    mode: Literal["live", "blocking", "recompute"] = "live"
    max_outgoing: int = Field(4, ge=1, description="requests on their way out of one worker")
    timeout_s: float = Field(2.0, gt=0, description="that the other side may take for a step")
    bytes_per_s: int | None = Field(None, ge=2**20, description="of KV over one link; default: 32 MiB on CPUs")
    checkpoint_tokens: int = Field(
        0, ge=0, description="of a request, after which another worker copies its KV; 0: none"
    )

    @model_validator(mode="after")
    def _rise(self) -> Self:
        if not self.source_below <= self.source_until <= self.destination_above:
            raise ValueError("source_below, source_until and destination_above must rise, or requests go to and fro")
        return self


class ScalingSettings(_Section):
    """How many workers there are: as many as at the start, or between two bounds as load asks."""

    min_workers: int | None = Field(None, ge=1, le=1024, description="default: one")
    max_workers: int | None = Field(None, ge=1, le=1024, description="default: the number is fixed")
    scale_out_below: float = Field(64.0, description="mean freeness, in iterations, under which one more is started")
    scale_in_above: float = Field(512.0, description="and over which one ends")
    hold_s: float = Field(5.0, gt=0, description="for which it has to stay there")
    start_timeout_s: float = Field(600.0, gt=0, description="after which a worker that was started is not waited for")
    start_with: Literal["processes", "systemd", "command"] = "processes"
    unit: str = Field("actorserve-worker@{number}.service", description="of one worker, for systemd")
    command: str | None = Field(None, description="that starts a worker somewhere")

    @property
    def command_words(self) -> list[str]:
        """The command, taken apart as a shell does."""
        return shlex.split(self.command or "")

    @model_validator(mode="after")
    def _make_sense(self) -> Self:
        if self.max_workers is None:
            if self.min_workers is not None:
                raise ValueError("min_workers bounds a number that is fixed; set max_workers as well")
        elif (self.min_workers or 1) > self.max_workers:
            raise ValueError(f"min_workers is {self.min_workers}, and max_workers {self.max_workers}")
        if not self.scale_out_below < self.scale_in_above:
            raise ValueError(f"scale_out_below is {self.scale_out_below}, and scale_in_above {self.scale_in_above}")
        if self.start_with == "systemd" and "{number}" not in self.unit:
            raise ValueError(f"unit is {self.unit}, and must hold {{number}}, which tells the units apart")
        try:
            has_command = bool(self.command_words)
        except ValueError as error:
            raise ValueError(f"command is {self.command}: {error}") from None
        if self.start_with == "command" and not has_command:
            raise ValueError("start_with is command, and command names none")
        return self


class SupervisionSettings(_Section):
    """A child is restarted with exponential backoff, and given up after `max_restarts` within `window_s`."""

    max_restarts: int = Field(5, ge=0)
    window_s: float = Field(60.0, gt=0)
    backoff_s: float = Field(0.2, gt=0)
    max_backoff_s: float = Field(10.0, gt=0)


class Settings(_Section):
    http: HttpSettings = HttpSettings()
    model: ModelSettings = ModelSettings()
    workers: WorkerSettings = WorkerSettings()
    cluster: ClusterSettings = ClusterSettings()
    migration: MigrationSettings = MigrationSettings()
    scaling: ScalingSettings = ScalingSettings()
    supervision: SupervisionSettings = SupervisionSettings()


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
