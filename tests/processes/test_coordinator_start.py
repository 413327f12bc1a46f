"""What a coordinator's process loads. After a death, requests wait for it."""

import os
import select
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from actorserve.processes.child import command_line, write_settings
from actorserve.processes.status import PARENT_PID, STATUS_FD, Phase, decode_status
from actorserve.settings import Settings
from tests.folders import make_runtime_folder

DEADLINE_S = 60.0
NEVER = (
    *("rich", "starlette", "hypercorn", "httpx", "prompt_toolkit", "jinja2", "tokenizers", "numpy", "torch"),
    *("prometheus_client", "actorserve.commands", "actorserve.console", "actorserve.http", "actorserve.model_files"),
    *("actorserve.programs.serve", "actorserve.core.gateway.state", "actorserve.core.instance.state"),
)
SCRIPT = """
import atexit, sys
atexit.register(lambda: print(*sys.modules))
from actorserve.cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("keeps_journals", [False, True])
def test_a_coordinator_loads_only_what_it_uses(tmp_path: Path, keeps_journals: bool) -> None:
    """From its start to its end a coordinator loads neither HTTP, tokenizers and templates, nor the other cores."""
    folder = make_runtime_folder()
    settings = Settings.model_validate({"cluster": {"journal_dir": tmp_path / "journals"} if keeps_journals else {}})
    write_settings(settings, tmp_path / "settings.json")
    arguments = command_line("coordinator", tmp_path / "settings.json", folder)
    reading, writing = os.pipe()
    with (
        os.fdopen(reading, "rb") as reports,
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, "coordinator", *arguments],
            env=os.environ | {STATUS_FD: str(writing), PARENT_PID: str(os.getpid())},
            pass_fds=[writing],
            stdout=subprocess.PIPE,
            text=True,
        ) as process,
    ):
        os.close(writing)
        try:
            readable, _, _ = select.select([reports], [], [], DEADLINE_S)
            report = decode_status(reports.readline()) if readable else None
            assert report is not None
            assert report.phase is Phase.READY
            process.send_signal(signal.SIGTERM)
            loaded = process.communicate(timeout=DEADLINE_S)[0].split()
        finally:
            process.kill()
            shutil.rmtree(folder)
    assert process.returncode == 0
    assert "actorserve.core.cluster.state" in loaded
    assert [name for name in loaded if any(name == never or name.startswith(f"{never}.") for never in NEVER)] == []


def test_a_unit_of_systemd_loads_little_before_it_becomes_its_process() -> None:
    """``actorserve process`` replaces itself by the process at once, so it loads neither settings nor messages."""
    script = "import atexit, sys\natexit.register(lambda: print(*sys.modules))\n"
    script += "from actorserve.cli import main\nsys.exit(main(['process', 'coordinator', '--runtime-dir', '/nowhere']))"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert "nothing is prepared in /nowhere" in done.stderr
    assert {"pydantic", "actorserve.core.messages", "zmq"}.isdisjoint(done.stdout.split())
