"""``actorserve serve``: a whole server on this host, as a supervisor and its children."""

import asyncio
import signal
from pathlib import Path

from rich.console import Console

from actorserve.actors.supervisor import Supervisor
from actorserve.http.access.api_keys import read_api_keys
from actorserve.http.host_counts import COUNTS, OPEN_COUNTS
from actorserve.model_files.chat_template import read_chat_template
from actorserve.model_files.describe import describe
from actorserve.model_files.locate import hub_name, locate
from actorserve.processes import child, launch
from actorserve.processes.console import ProgressDisplay, StartDisplay, usage_text
from actorserve.processes.runtime_folder import SETTINGS, runtime_folder
from actorserve.processes.signals import on_termination
from actorserve.processes.supervision import SupervisionTree
from actorserve.processes.supervision_tree import supervision_tree
from actorserve.settings import Settings


def serve(settings: Settings) -> bool:
    """Run a server until it is told to end. Returns whether its children finished the requests in flight.

    Raises: ActorserveError when the server cannot start or cannot go on; KeyboardInterrupt for a Ctrl-C or SIGTERM
    that comes before its children run.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # until the children run, SIGTERM ends us as Ctrl-C does
    # The quick checks come first, so that a port in use is reported before the model is downloaded.
    if settings.http.api_keys_file is not None:
        read_api_keys(settings.http.api_keys_file)
    if settings.model.chat_template != "auto":
        read_chat_template(Path(settings.model.chat_template))
    port = launch.free_port(settings.http.host, settings.http.port)
    settings = launch.replace(settings, "http", port=port)
    with ProgressDisplay(Console(stderr=True)) as display:
        settings, placement = launch.resolve_workers(settings)
        settings = _resolve_model(settings, display)
        with runtime_folder(settings.cluster, (COUNTS, OPEN_COUNTS)) as runtime_dir:
            settings_file = runtime_dir / SETTINGS
            child.write_settings(settings, settings_file)
            tree = supervision_tree(placement, settings, settings_file, runtime_dir)
            host = f"[{settings.http.host}]" if ":" in settings.http.host else settings.http.host
            usage = usage_text(f"http://{host}:{port}", settings.model.name or "")
            return asyncio.run(_supervise(tree, StartDisplay(display, usage)))


def _resolve_model(settings: Settings, display: ProgressDisplay) -> Settings:
    """The settings with the model's path on disk and its name. A model that is missing on disk is downloaded first."""
    load_format = settings.model.load_format
    path = locate(
        settings.model.path, lambda done, total: display.update("model", "downloading", done / total), load_format
    )
    hub = hub_name(settings.model.path)
    name = settings.model.name or (describe(path, load_format).name if hub is None else hub.served_name)
    return launch.replace(settings, "model", path=str(path), name=name)


async def _supervise(tree: SupervisionTree, listener: StartDisplay) -> bool:
    supervisor = Supervisor(tree, listener)
    on_termination(supervisor.shut_down, signal.SIGHUP)
    await supervisor.run()
    return not supervisor.was_killed
