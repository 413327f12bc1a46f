"""A server's settings. A TOML file overrides the defaults, and command-line options override the file.

``config/actorserve.toml`` shows every setting with its default. Unknown names are errors, so a misspelt setting is
found at start. Names end with the unit. The options that a simulated cluster shares are in ``actorserve.options``.
"""

import math
import shlex
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails

from actorserve.errors import NOT_TOML, SettingsError
from actorserve.nearest import unknown
from actorserve.options import (
    MAX_S,
    MAX_WORKERS,
    ClusterOptions,
    MigrationOptions,
    Period,
    PoolsOptions,
    RoleName,
    ScalingOptions,
    SchedulingOptions,
)


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="constants")


MAX_GATEWAYS = 64
MAX_WATTS = 1e9


class HttpSettings(_Section):
    """The HTTP API."""

    host: str = Field("127.0.0.1", description="address on which the gateway listens")
    port: int = Field(8000, ge=0, le=65535, description="port on which the gateway listens; 0: any free port")
    gateways: int = Field(
        1, ge=1, le=MAX_GATEWAYS, description="number of gateway processes on this host, which share the port"
    )
    api_keys_file: Path | None = Field(None, description="file of API keys; default: clients need no key")
    cors_origins: tuple[Annotated[str, Field(pattern=r"^(\*|[a-z][a-z0-9+.-]*://[^/\s]+)$")], ...] = Field(
        (), description="origins of web pages that may call the API from a browser, or `*`"
    )
    allowed_hosts: tuple[Annotated[str, Field(pattern=r"^(\*|[^\s/:@]+)$")], ...] = Field(
        (), description="further names by which clients may call the server (the header Host), or `*`"
    )
    tls_cert_file: Path | None = Field(
        None, description="file of the certificate and its chain, in PEM form; default: no encryption"
    )
    tls_key_file: Path | None = Field(None, description="file of the certificate's private key; default: none")
    write_timeout_s: float = Field(
        60.0, gt=0, description="a client that reads nothing of its answer for this time is cut off; inf: never"
    )
    max_body_bytes: int = Field(8 * 2**20, ge=1024, description="largest body of an HTTP request, in bytes")
    max_open_requests: int = Field(
        4096,
        ge=1,
        description="maximum number of choices that are generated at once by all gateways; further requests get 429",
    )
    max_choices: int = Field(16, ge=1, description="largest `n` of a request")
    max_stop_strings: int = Field(16, ge=1, description="maximum number of stop strings of one request")
    max_stop_chars: int = Field(256, ge=1, description="maximum length of a stop string, in characters")
    max_top_logprobs: int = Field(20, ge=0, description="largest `top_logprobs` of a request")
    max_prompt_logprobs: int = Field(
        131072,
        ge=0,
        le=2**19,
        description="maximum number of log-probabilities, or of ids, of prompts' tokens in one answer",
    )
    max_answer_s: float = Field(
        math.inf, gt=0, description="longest time of an answer, after which it fails with 408; inf: no limit"
    )
    unknown_fields: Literal["ignore", "refuse"] = Field(
        "ignore",
        description="fields that this server does not know, in requests: ignored and counted, or refused with 400",
    )
    keep_alive_s: float = Field(
        15.0, gt=0, description="a stream that was silent for this time gets a comment, so that proxies do not close it"
    )
    lame_duck_s: float = Field(
        0.0,
        ge=0,
        le=MAX_S,
        description="time in which a gateway that was told to stop still takes requests, while /ready answers 503",
    )
    template_timeout_s: float = Field(5.0, gt=0, description="longest computing time for rendering a chat template")
    grammar_timeout_s: float = Field(
        1.0, gt=0, description="longest computing time for compiling a request's JSON schema, regex or grammar"
    )

    @model_validator(mode="after")
    def _check_tls(self) -> Self:
        if (self.tls_cert_file is None) != (self.tls_key_file is None):
            raise ValueError("tls_cert_file and tls_key_file have an effect only together: set both")
        return self


class ModelSettings(_Section):
    """The served model."""

    path: str = Field("default", description="`default`, a GGUF file, a Hugging Face folder, or org/name on a hub")
    name: str | None = Field(None, description="the model name in clients' requests; default: the model's own name")
    aliases: tuple[Annotated[str, Field(min_length=1, max_length=256)], ...] = Field(
        (), description="further names by which clients may call the model"
    )
    chat_template: str = Field(
        "auto", description="auto: the model's own chat template; otherwise a file with a template in Jinja's language"
    )
    load_format: Literal["auto", "dummy"] = Field(
        "auto", description="auto: load the model's weights; dummy: random weights, for measurements"
    )
    dtype: Literal["auto", "int8", "int4", "float32", "bfloat16"] = Field(
        "auto",
        description="number format of the computation; auto: int8 on CPUs, bfloat16 on GPUs, float32 on older GPUs",
    )
    tool_parser: Literal["auto", "hermes", "qwen3_coder", "llama3", "mistral", "none"] = Field(
        "auto",
        description="form of tool calls in the model's text; auto: decided by the chat template; none: requests with "
        "tools are refused",
    )
    reasoning_parser: Literal["auto", "think", "none"] = Field(
        "auto",
        description="think: text between <think> and </think> is reasoning, not part of the answer; auto: decided by "
        "the chat template; none: all text is the answer",
    )


class WorkerSettings(SchedulingOptions, _Section):
    """The workers. A worker is one process with one engine."""

    count: int | None = Field(
        None, ge=1, le=MAX_WORKERS, description="number of workers; default: one per GPU, or two without a GPU"
    )
    roles: tuple[RoleName, ...] = Field(
        (),
        strict=False,
        max_length=MAX_WORKERS,
        description="what worker 0, worker 1, ... compute: prompts, the tokens after them, or both (mixed); further "
        "workers are mixed",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="device of the workers; auto: GPUs if there are any, otherwise the CPU"
    )
    engine: Literal["torch", "fake"] = Field("torch", description="what computes; fake: meaningless tokens, for tests")
    threads: int | None = Field(
        None, ge=1, description="number of CPU threads per worker; default: an equal share of the cores"
    )
    memory_bytes: int | None = Field(
        None,
        ge=1,
        description="total memory of a CPU worker; default: an equal share of the memory available at the start",
    )
    kv_cache_bytes: int | None = Field(
        None,
        ge=1,
        description="size of a worker's KV cache; default: a part of the memory that weights and computing leave free",
    )
    host_kv_bytes: int | None = Field(
        None,
        ge=0,
        description="host memory of a worker for swapped KV; default: 0 (none) on CPUs; on GPUs as much as its KV "
        "cache, and at most a quarter of its share of the host's memory",
    )
    max_context_tokens: int | None = Field(
        None,
        ge=2,
        description="maximum number of prompt and output tokens of a request; default: the model's own limit",
    )
    policy: Literal["skip_join_mlfq", "shortest_expected", "fcfs", "naive_mlfq", "fixed_priority", "srpt"] = Field(
        "skip_join_mlfq", description="scheduling policy of a worker"
    )
    profile: Path | None = Field(
        None,
        description="profile with the times of iterations; default: measured at the first start, and kept in the cache",
    )


class ClusterSettings(ClusterOptions, _Section):
    """How processes find and watch each other. All sockets are in ``runtime_dir``, which only its owner may enter."""

    runtime_dir: Path | None = Field(None, description="folder of the sockets; default: a fresh private folder")
    heartbeat_s: Period = Field(0.25, description="time between two heartbeats of a process")
    takeover_after_s: Period = Field(
        0.5,
        description="time after which the next coordinator takes over from one that is silent; if none does, "
        "gateways place requests by themselves from 1.75 times as long on",
    )
    drain_timeout_s: float = Field(
        30.0, gt=0, description="time for running requests to finish after the server was told to stop"
    )
    journal_dir: Path | None = Field(
        None,
        description="folder of the journals, in which processes record the inputs of their cores; default: no journals",
    )
    audit_dir: Path | None = Field(
        None, description="folder of the file with the acts of operators; default: the folder of the sockets"
    )


class MigrationSettings(MigrationOptions, _Section):
    """Migration between real workers."""

    @model_validator(mode="after")
    def _check_pace(self) -> Self:
        if self.bytes_per_s is not None and self.bytes_per_s < 2**20:
            raise ValueError(f"bytes_per_s is {self.bytes_per_s:g}: expected at least {2**20}")
        return self


class PoolsSettings(PoolsOptions, _Section):
    """The pools of prompt, token and mixed workers (``workers.roles``)."""


class ScalingSettings(ScalingOptions, _Section):
    """How further workers are started."""

    start_with: Literal["processes", "systemd", "command"] = Field(
        "processes", description="what starts a worker: this server on this machine, systemd, or a command"
    )
    unit: str = Field("actorserve-worker@{number}.service", description="with systemd: the unit of worker {number}")
    command: str | None = Field(None, description="with command: the command line that starts a worker; default: none")

    @property
    def command_words(self) -> list[str]:
        """The command, split into words as a shell does."""
        return shlex.split(self.command or "")

    @model_validator(mode="after")
    def _check_starts(self) -> Self:
        if self.start_with == "systemd" and "{number}" not in self.unit:
            raise ValueError(f"unit is {self.unit}: expected {{number}} in it, so that the units differ")
        try:
            has_command = bool(self.command_words)
        except ValueError as error:
            raise ValueError(f"command is {self.command}: {error}") from None
        if self.start_with == "command" and not has_command:
            raise ValueError("start_with is command: expected a setting `command` as well")
        return self


class PowerSettings(_Section):
    """Power caps of GPUs, which a process of its own sets on each host (`actorserve power`)."""

    budget_watts: float | None = Field(
        None,
        gt=0,
        le=MAX_WATTS,
        description="what the GPUs of all hosts together may take, in watts; default: no budget. Hosts of a cluster "
        "have budgets of their own in the cluster's file",
    )
    curves: str = Field(
        "h100",
        description="how much longer prompts and tokens take under a cap: the kind of GPU that is most like yours, "
        "h100 or a100, or a profile that `tools/profile --caps` wrote",
    )
    hold_s: Period = Field(5.0, description="time before a cap that was lowered is raised again")
    alone_after_s: Period = Field(
        60.0,
        description="time without a coordinator after which a host's budget is shared evenly among its GPUs; until "
        "then caps stay as they are",
    )


class SupervisionSettings(_Section):
    """A process that fails is restarted after a pause that doubles each time."""

    max_restarts: int = Field(
        5,
        ge=0,
        description="how often a process may be restarted within window_s; its next failure ends the server",
    )
    window_s: float = Field(60.0, gt=0, description="time window in which restarts count towards max_restarts")
    backoff_s: float = Field(0.05, gt=0, description="pause before the first restart")
    max_backoff_s: float = Field(10.0, gt=0, description="longest pause before a restart")


class LogSettings(_Section):
    """The log of every process, on stderr."""

    format: Literal["auto", "text", "json"] = Field(
        "auto", description="text: lines for people; json: one object a line; auto: text on a terminal, otherwise json"
    )
    level: Literal["debug", "info", "warning", "error"] = Field(
        "info",
        description="least level of the events that are logged; info: a line for every request; debug: also one for "
        "each message between processes about a request",
    )
    trace_endpoint: Annotated[str, Field(pattern=r"^https?://\S+$")] | None = Field(
        None, description="URL of an OpenTelemetry collector (OTLP over HTTP) for spans of requests; default: no spans"
    )


class Settings(_Section):
    """All sections of the file."""

    http: HttpSettings = HttpSettings()
    model: ModelSettings = ModelSettings()
    workers: WorkerSettings = WorkerSettings()
    cluster: ClusterSettings = ClusterSettings()
    migration: MigrationSettings = MigrationSettings()
    pools: PoolsSettings = PoolsSettings()
    scaling: ScalingSettings = ScalingSettings()
    power: PowerSettings = PowerSettings()
    supervision: SupervisionSettings = SupervisionSettings()
    log: LogSettings = LogSettings()

    @property
    def num_workers(self) -> int:
        """How many workers run from the start; 0 until ``workers.count`` is resolved."""
        return self.workers.count or 0


def load_settings(file: Path | None, overrides: dict[str, dict[str, Any]] | None = None) -> Settings:
    """Read ``file`` (TOML) and apply ``overrides`` (section -> name -> value; None values are skipped).

    Raises: SettingsError, in one line that names the file and each wrong setting.
    """
    values: dict[str, Any] = {}
    if file is not None:
        try:
            values = tomllib.loads(file.read_text(encoding="utf-8"))
        except (OSError, *NOT_TOML) as error:
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
        problems = [f"{'.'.join(map(str, found['loc']))}: {_problem(found)}" for found in error.errors()]
        raise SettingsError(f"{file or 'settings'}: {'; '.join(problems[:10])}", problems) from None


def _problem(found: ErrorDetails) -> str:
    """What is wrong, for a person. An unknown name comes with the nearest name that its section has."""
    if found["type"] != "extra_forbidden":
        return found["msg"]
    *above, name = found["loc"]
    known: type[BaseModel] = Settings
    for step in above:
        known = type(getattr(known(), str(step)))
    return unknown(known.model_fields, str(name))
