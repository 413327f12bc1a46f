"""The cluster's file, the same on every host: its id, its hosts with their addresses and keys, and what runs there.

``config/cluster.toml`` is an example. A file is read whole or not at all: ``read_cluster_file`` reports all mistakes at
once, so that a half-written edit changes nothing.
"""

import tomllib
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator
from pydantic_core import ErrorDetails

from actorserve.cluster.mistakes import CONSOLE_PORT, COORDINATOR_PORT, KV_PORT, mistakes_among_hosts
from actorserve.cluster.spelling import host_at, respelled
from actorserve.cluster.words import check_address, check_id, check_key, check_name, check_reachable
from actorserve.errors import NOT_TOML, SettingsError
from actorserve.local_trust import open_plain
from actorserve.nearest import unknown
from actorserve.options import MAX_WORKERS, RoleName
from actorserve.settings import MAX_GATEWAYS, MAX_WATTS

DEFAULT_CLUSTER_FILE: Final = Path("/etc/actorserve/cluster.toml")

Address = Annotated[str, AfterValidator(check_address)]
Reachable = Annotated[str, AfterValidator(check_reachable)]
Name = Annotated[str, AfterValidator(check_name)]
PublicKey = Annotated[str, AfterValidator(check_key)]
Port = Annotated[int, Field(ge=1, le=65535)]


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Host(_Table):
    """One host, and how many gateways and workers run there. ``roles`` are those of its first workers, while the others
    are mixed.
    """

    name: Name
    address: Reachable
    bind: Address | None = None
    public_key: PublicKey | None = None
    actuator_key: PublicKey | None = None
    gateways: int = Field(0, ge=0, le=MAX_GATEWAYS)
    workers: int = Field(0, ge=0, le=MAX_WORKERS)
    roles: Annotated[tuple[RoleName, ...], Field(strict=False)] = ()
    budget_watts: float | None = Field(None, gt=0, le=MAX_WATTS, strict=False)

    @field_validator("roles")
    @classmethod
    def _check_roles(cls, roles: tuple[RoleName, ...], info: ValidationInfo) -> tuple[RoleName, ...]:
        num_workers = info.data.get("workers", 0)
        if len(roles) > num_workers:
            raise ValueError(f"{len(roles)} roles for {num_workers} workers")
        return roles


class ClusterFile(_Table):
    """The file's content. ``coordinators`` are names of hosts, in the order in which they serve."""

    id: Annotated[str, AfterValidator(check_id)]
    coordinators: Annotated[tuple[Name, ...], Field(strict=False)]
    coordinator_port: Port = COORDINATOR_PORT
    console_port: Port = CONSOLE_PORT
    kv_port: Port = KV_PORT
    hosts: Annotated[tuple[Host, ...], Field(alias="host", strict=False)]
    operators: dict[Name, PublicKey] = {}
    viewers: dict[Name, PublicKey] = {}

    def host(self, name: str) -> Host:
        """The host called ``name``. Raises: SettingsError if the file has none."""
        for host in self.hosts:
            if host.name == name:
                return host
        raise SettingsError(f"host {name} is {unknown((host.name for host in self.hosts), name)}")

    @property
    def coordinator_hosts(self) -> tuple[Host, ...]:
        """The hosts of the coordinators, in the order in which they serve."""
        return tuple(map(self.host, self.coordinators))


def read_cluster_file(file: Path) -> ClusterFile:
    """Raises: SettingsError, in one line that names the file and all mistakes in it."""
    return parse_cluster(read_cluster_text(file), file)


def read_cluster_text(file: Path) -> str:
    """The file's text. Raises: SettingsError."""
    try:
        with open_plain(file) as opened:
            return opened.read().decode()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"cannot read the cluster's file {file}: {error}") from None


def parse_cluster(text: str, file: Path) -> ClusterFile:
    """What ``text``, which was read from ``file``, says. Raises: SettingsError, as ``read_cluster_file``."""
    try:
        values = tomllib.loads(text)
    except NOT_TOML as error:
        raise SettingsError(f"cannot read the cluster's file {file}: {error}") from None
    found = None
    values, problems = respelled(values, _keys(ClusterFile), _keys(Host))
    try:
        found = ClusterFile.model_validate(values)
    except ValidationError as error:
        problems += [f"{_place(values, mistake)}: {_problem(mistake)}" for mistake in error.errors()]
    problems += mistakes_among_hosts(values)
    if found is None or problems:
        raise SettingsError(f"{file}: {'; '.join(problems)}", problems)
    return found


def _place(values: dict[str, Any], mistake: ErrorDetails) -> str:
    """Where a mistake is: a host by its name, or by its number from 1 if it has none."""
    match mistake["loc"]:
        case ("host", int(index), *inside):
            return ": ".join(map(str, (host_at(values["host"], index), *inside)))
        case place:
            return ".".join(map(str, place))


def _keys(table: type[_Table]) -> list[str]:
    return [field.alias or name for name, field in table.model_fields.items()]


def _problem(mistake: ErrorDetails) -> str:
    return "missing" if mistake["type"] == "missing" else mistake["msg"].removeprefix("Value error, ")
