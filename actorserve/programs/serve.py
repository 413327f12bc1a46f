"""``actorserve serve`` and ``actorserve host``: a whole server on this host, or one host's share of a cluster, as a
supervisor and its children.
"""

import asyncio
import signal
from pathlib import Path

from rich.console import Console

from actorserve.actors.supervisor import Listener, Supervisor
from actorserve.cluster.conflicts import conflicts
from actorserve.cluster.file import ClusterFile, Host, parse_cluster, read_cluster_text
from actorserve.cluster.keys import check_own_key, public_keys
from actorserve.cluster.resolving import listening_address, numeric_address
from actorserve.errors import SettingsError
from actorserve.http.access.api_keys import read_api_keys
from actorserve.http.access.tls import read_tls
from actorserve.http.host_counts import COUNTS, OPEN_COUNTS, HostCounts
from actorserve.http.metrics.names import RESTARTS
from actorserve.model_files.chat_template import read_chat_template
from actorserve.model_files.describe import describe
from actorserve.model_files.locate import hub_name, locate
from actorserve.options import MAX_WORKERS
from actorserve.processes import child, launch
from actorserve.processes.console import ProgressDisplay, StartDisplay, usage_text
from actorserve.processes.reload import Hangup
from actorserve.processes.runtime_folder import CLUSTER, HOST, SETTINGS, folder_of_host, host_text, runtime_folder
from actorserve.processes.signals import on_termination
from actorserve.processes.status import Reporter
from actorserve.processes.supervision import News, Restarting, SupervisionTree
from actorserve.processes.supervision_tree import HostShare, supervision_tree
from actorserve.processes.units.process_file import write_processes
from actorserve.processes.units.systemd import attach_to_systemd
from actorserve.processes.units.unit_news import UnitNews
from actorserve.settings import Settings
from actorserve.wire.curve.key_files import read_key_file
from actorserve.wire.trust import TrustError


def serve(settings: Settings, *, prepares: bool = False) -> bool:
    """Run a server until it is told to end. Returns whether its children finished the requests in flight.

    If it only ``prepares``, it does all that comes before its children, and leaves them to units of systemd.

    Raises: ActorserveError when the server cannot start or cannot go on; KeyboardInterrupt for a Ctrl-C or SIGTERM
    that comes before its children run.
    """
    unit = attach_to_systemd()
    _end_as_ctrl_c_does()
    settings = _with_http_checked(settings)
    with ProgressDisplay(Console(stderr=True)) as display:
        settings, placement = launch.resolve_workers(settings, as_units=prepares)
        return _run(_resolve_model(settings, display, unit), placement, display, unit, prepares=prepares)


def serve_host(settings: Settings, cluster_file: Path, name: str, key_file: Path, *, prepares: bool = False) -> bool:
    """Run the share of the host called ``name`` until it is told to end. ``key_file`` has its secret key, which is read
    if the cluster has keys. Returns and raises as ``serve``.
    """
    unit = attach_to_systemd()
    _end_as_ctrl_c_does()
    cluster_toml = read_cluster_text(cluster_file)
    cluster = parse_cluster(cluster_toml, cluster_file)
    host = cluster.host(name)
    problems = conflicts(settings, cluster)
    if problems:
        raise SettingsError("; ".join(problems))
    has_keys = _check_keys(cluster, name, key_file)
    running = folder_of_host(settings.cluster, cluster.id, name)
    if running is not None:  # looked for before the ports, which the share that runs has taken
        raise SettingsError(f"host {name} runs already on this machine, with the runtime folder {running}")
    _check_addresses(cluster, host)
    if host.gateways:
        settings = _with_http_checked(launch.replace(settings, "http", gateways=host.gateways))
    with ProgressDisplay(Console(stderr=True)) as display:
        settings, placement = _place_share(settings, cluster, host, as_units=prepares)
        if host.gateways or host.workers:
            settings = _resolve_model(settings, display, unit)
        share = HostShare(
            name,
            cluster_toml,
            host in cluster.coordinator_hosts,
            host.gateways,
            cluster_file.absolute(),
            key_file.absolute() if has_keys else None,
            cluster.id,
        )
        return _run(settings, placement, display, unit, share, prepares=prepares)


def _run(
    settings: Settings,
    placement: launch.Placement,
    display: ProgressDisplay,
    unit: Reporter,
    share: HostShare | None = None,
    *,
    prepares: bool,
) -> bool:
    """Run the children, whose settings are resolved. Returns as ``serve``."""
    with runtime_folder(settings.cluster, (COUNTS, OPEN_COUNTS)) as folder:
        child.write_settings(settings, folder / SETTINGS)
        if share is not None:  # what was checked, so that an edit since then cannot change half of the children
            (folder / CLUSTER).write_text(share.cluster_toml, encoding="utf-8")
            (folder / HOST).write_text(host_text(share.cluster_id, share.name), encoding="utf-8")
        tree = supervision_tree(placement, settings, folder / SETTINGS, folder, share)
        if prepares:
            write_processes(tree, folder)
            return True
        usage = f"ready: host {share.name}\n" if share is not None and not share.num_gateways else _usage(settings)
        news = UnitNews(StartDisplay(display, usage).show, unit, tree.drain_timeout_s)
        return asyncio.run(_supervise(tree, news, folder))


def _end_as_ctrl_c_does() -> None:
    """Until the children run, SIGTERM ends this process as Ctrl-C does."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


def _with_http_checked(settings: Settings) -> Settings:
    """The settings with the port that gateways will listen on.

    These quick checks come first, so that a port in use is reported before the model is downloaded.
    """
    if settings.http.api_keys_file is not None:
        read_api_keys(settings.http.api_keys_file)
    read_tls(settings.http.tls_cert_file, settings.http.tls_key_file)
    if settings.model.chat_template != "auto":
        read_chat_template(Path(settings.model.chat_template))
    return launch.replace(settings, "http", port=launch.free_port(settings.http.host, settings.http.port))


def _check_keys(cluster: ClusterFile, host: str, key_file: Path) -> bool:
    """Whether the cluster has keys. Raises: SettingsError if it needs other ones, or if the file has not the host's."""
    try:
        keys = public_keys(cluster)
        if keys is not None:
            check_own_key(read_key_file(key_file), keys, host)
    except (SettingsError, TrustError) as error:
        raise SettingsError(f"host {host} cannot run here: {error}") from None
    return keys is not None


def _check_addresses(cluster: ClusterFile, host: Host) -> None:
    """Raises: SettingsError if the host's address is another machine's, if its share already runs here, or if a
    coordinator's address cannot be looked up.
    """
    try:
        for coordinator_host in cluster.coordinator_hosts:
            numeric_address(coordinator_host.address)
        listening = listening_address(host)
        launch.free_port(listening, 0)
        if host in cluster.coordinator_hosts:
            launch.free_port(listening, cluster.coordinator_port, "coordinator_port")
            if cluster.operators or cluster.viewers:
                launch.free_port(listening, cluster.console_port, "console_port")
        for index in range(host.workers):
            launch.free_port(listening, cluster.kv_port + index, "kv_port")
    except (SettingsError, launch.LaunchError) as error:
        raise SettingsError(f"host {host.name} cannot run here: {error}") from None


def _place_share(
    settings: Settings, cluster: ClusterFile, host: Host, *, as_units: bool
) -> tuple[Settings, launch.Placement]:
    """The settings and the devices of the host's workers.

    Raises: SettingsError for settings that this machine cannot meet; LaunchError.
    """
    most = settings.scaling.max_workers
    if host.workers == 0:
        placement = launch.Placement(0, (), 1)
    else:
        fixed = launch.replace(settings, "scaling", max_workers=None)
        roles = host.roles or settings.workers.roles
        alone = launch.replace(fixed, "workers", count=host.workers, roles=roles)
        resolved, placement = launch.resolve_workers(alone, as_units=as_units)
        settings = launch.replace(resolved, "scaling", max_workers=most)
    # The coordinator scales the whole cluster.
    num_workers = sum(each.workers for each in cluster.hosts)
    return launch.replace(settings, "workers", count=min(num_workers, MAX_WORKERS)), placement


def _usage(settings: Settings) -> str:
    host = f"[{settings.http.host}]" if ":" in settings.http.host else settings.http.host
    scheme = "http" if settings.http.tls_cert_file is None else "https"
    return usage_text(f"{scheme}://{host}:{settings.http.port}", settings.model.name or "")


def _resolve_model(settings: Settings, display: ProgressDisplay, unit: Reporter) -> Settings:
    """The settings with the model's path on disk and its name. A model that is missing on disk is downloaded first."""

    def show(done: int, total: int) -> None:
        display.update("model", "downloading", done / total)
        unit.loading("downloading the model", done / total)

    load_format = settings.model.load_format
    path = locate(settings.model.path, show, load_format)
    hub = hub_name(settings.model.path)
    name = settings.model.name or (describe(path, load_format).name if hub is None else hub.served_name)
    return launch.replace(settings, "model", path=str(path), name=name)


class _RestartCounts:
    """Counts the restarts of this host's processes where its gateways find them, and passes all news on."""

    def __init__(self, listener: Listener, counts: HostCounts) -> None:
        self._listener = listener
        self._counts = counts

    def show(self, news: News) -> None:
        if isinstance(news, Restarting):
            self._counts.values[self._counts.cell((RESTARTS, news.name))] += 1.0
        self._listener.show(news)


async def _supervise(tree: SupervisionTree, listener: Listener, runtime_dir: Path) -> bool:
    supervisor = Supervisor(tree, _RestartCounts(listener, HostCounts(runtime_dir / COUNTS, "supervisor")))
    hangup = Hangup()
    on_termination(supervisor.shut_down)
    asyncio.get_running_loop().add_signal_handler(
        signal.SIGHUP, lambda: supervisor.shut_down() if hangup.is_terminal_gone else supervisor.reload()
    )
    await supervisor.run()
    return not supervisor.was_killed
