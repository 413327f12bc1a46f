"""Imports have one direction, and some calls occur nowhere: checked in every file, and in a running process."""

import ast
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.sources import MODULES, OURS, ROOT, SOURCES, imports_of, module_name, parse, within

# What each part may import of ours, besides itself. The longest entry that a module's name begins with
# counts; a module without an entry may import nothing of ours.
BASE = (
    "actorserve.errors",
    "actorserve.host",
    "actorserve.options",
    "actorserve.core_configs",
    "actorserve.settings",
    "actorserve.nearest",
    "actorserve.cluster",
    "actorserve.profile_files",
    "actorserve.local_trust",
    "actorserve.logs",
    "actorserve.processes.status",
    "actorserve.processes.units.systemd",
    "actorserve.processes.child",
    "actorserve.processes.reload",
    "actorserve.processes.signals",
)
CORE_WORDS = ("messages", "effects", "request", "rng", "defaults")  # the shared vocabulary of the core's folders
CORE_FOLDERS: dict[str, tuple[str, ...]] = {
    "messages": (),
    "rng": (),
    "defaults": (),
    "effects": ("messages",),
    "kv": ("messages", "effects"),
    "prompt_scores": ("messages",),
    "request": ("messages", "kv", "prompt_scores"),
    "participant": ("messages", "request"),
    "timing": CORE_WORDS,
    "prediction": CORE_WORDS,
    "scheduling": (*CORE_WORDS, "timing", "kv", "prediction"),
    "placement": (*CORE_WORDS, "kv"),
    "pools": (*CORE_WORDS, "timing", "placement"),
    "power": (*CORE_WORDS, "timing"),
    "migration": (*CORE_WORDS, "participant", "timing", "kv", "scheduling", "placement"),
    "checkpoints": (*CORE_WORDS, "participant", "kv", "placement"),
    "operations": ("messages", "effects"),
    "instance": (
        *(*CORE_WORDS, "participant", "operations", "timing", "kv", "scheduling", "placement", "migration"),
        "checkpoints",
        "power",
    ),
    "cluster": (
        *CORE_WORDS,
        "operations",
        "timing",
        "kv",
        "scheduling",
        "placement",
        "pools",
        "migration",
        "checkpoints",
        "power",
    ),
    "gateway": (*CORE_WORDS, "operations", "placement", "pools", "cluster"),
    "recipes": ("timing", "scheduling", "instance", "cluster", "gateway"),
    "replay": ("recipes", "timing", "prediction", "scheduling", "instance", "cluster", "gateway"),
}
ALLOWED: dict[str, tuple[str, ...]] = {
    "actorserve.core": (),
    **{
        f"actorserve.core.{folder}": tuple(f"actorserve.core.{lower}" for lower in allowed)
        for folder, allowed in CORE_FOLDERS.items()
    },
    "actorserve.errors": (),
    "actorserve.host": (),
    "actorserve.local_trust": ("actorserve.errors",),
    "actorserve.logs": (),
    "actorserve.processes.status": (),
    "actorserve.processes.units.systemd": ("actorserve.processes.status",),
    "actorserve.options": ("actorserve.core",),
    "actorserve.core_configs": ("actorserve.core", "actorserve.options"),
    "actorserve.nearest": (),
    "actorserve.settings": ("actorserve.errors", "actorserve.options", "actorserve.nearest"),
    "actorserve.cluster": (
        *("actorserve.errors", "actorserve.options", "actorserve.nearest", "actorserve.settings"),
        *("actorserve.core.messages", "actorserve.wire.trust", "actorserve.local_trust"),
    ),
    "actorserve.profile_files": ("actorserve.errors", "actorserve.core"),
    "actorserve.processes.child": BASE,
    "actorserve.processes": ("actorserve.core.messages", *BASE),
    "actorserve.sim": (
        "actorserve.core",
        "actorserve.errors",
        "actorserve.options",
        "actorserve.core_configs",
        "actorserve.profile_files",
    ),
    "actorserve.wire": ("actorserve.core", "actorserve.errors"),
    "actorserve.actors": ("actorserve.core", "actorserve.wire", "actorserve.processes", *BASE),
    "actorserve.model_files": ("actorserve.errors", "actorserve.local_trust"),
    "actorserve.http": ("actorserve.core", "actorserve.model_files", *BASE),
    "actorserve.console": ("actorserve.core", "actorserve.wire", "actorserve.processes.runtime_folder", *BASE),
    "actorserve.programs": (
        "actorserve.console",
        "actorserve.wire",
        "actorserve.core",
        "actorserve.actors",
        "actorserve.processes",
        "actorserve.model_files",
        "actorserve.http",
        *BASE,
    ),
    "actorserve.commands": ("actorserve.programs", "actorserve.processes", *BASE),
    "actorserve.cli": ("actorserve.programs", "actorserve.processes", "actorserve.commands", *BASE),
    "actorserve.__main__": ("actorserve.cli",),
    "workers": ("actorserve.core", "actorserve.wire", "actorserve.actors", "actorserve.model_files", *BASE),
    "tools": ("actorserve", "workers"),
}
EVERYONE_MAY = ("actorserve", "actorserve.__version__", "actorserve.core")  # the packages hold nothing else

CORE_NEVER = frozenset(
    {
        *("asyncio", "concurrent", "contextvars", "ctypes", "datetime", "io", "logging", "multiprocessing", "os"),
        *("pathlib", "queue", "random", "sched", "secrets", "selectors", "shutil", "signal", "socket", "subprocess"),
        *("sys", "tempfile", "threading", "time", "uuid"),
    }
)
SERVING_NEVER = ("torch", "pynvml", "transformers", "workers", "triton")
RUNS_CODE = ("pickle", "cPickle", "cloudpickle", "dill", "shelve", "marshal")

# The engine's thread, where any error must end the process, and a library that raises plain Exception. A comment at
# the place gives the reason.
BROAD_EXCEPTS_ALLOWED = frozenset(
    {
        "workers/engines/engine_thread.py",
        "workers/power/driver_thread.py",
        "workers/sampling/grammars.py",
        "actorserve/model_files/tokenizer.py",
        "tests/core/faults/history.py",  # whatever fails in a history is reported with it
    }
)


def wrong_imports(module: str, imported: Iterator[str]) -> list[str]:
    part = max((name for name in ALLOWED if within(module, name)), key=len, default=module)
    allowed = (part, *ALLOWED.get(part, ()))
    wrong = []
    for name in imported:
        ours = any(within(name, package) for package in OURS)
        if ours and not any(within(name, package) for package in allowed) and name not in EVERYONE_MAY:
            wrong.append(name)
        if within(module, "actorserve.core") and not ours:
            top = name.split(".")[0]
            if top in CORE_NEVER or top not in sys.stdlib_module_names:
                wrong.append(name)
        if within(module, "actorserve") and any(within(name, package) for package in SERVING_NEVER):
            wrong.append(name)
    return wrong


def forbidden_calls(tree: ast.AST) -> list[str]:
    """Calls that run text as code."""
    return [
        f"line {node.lineno}: {node.func.id}()"
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("eval", "exec")
    ]


def broad_excepts(tree: ast.AST) -> list[str]:
    def names(node: ast.expr | None) -> list[str]:
        if node is None:
            return ["BaseException"]
        if isinstance(node, ast.Tuple):
            return [name for element in node.elts for name in names(element)]
        return [node.id] if isinstance(node, ast.Name) else []

    handlers = [node for node in ast.walk(tree) if isinstance(node, ast.ExceptHandler)]
    return [
        f"line {handler.lineno}" for handler in handlers if {"Exception", "BaseException"} & set(names(handler.type))
    ]


@pytest.mark.parametrize("path", [name for name in SOURCES if not name.startswith("tests/")])
def test_imports_point_one_way(path: str) -> None:
    """A module imports only from its own part and from the parts below it; the core imports only pure modules."""
    file = SOURCES[path]
    module = module_name(file)
    assert wrong_imports(module, imports_of(parse(file), module, file.name == "__init__.py")) == []


@pytest.mark.parametrize("path", SOURCES)
def test_nothing_can_run_what_it_reads(path: str) -> None:
    """No file imports pickle or a similar module, and none calls eval or exec."""
    file = SOURCES[path]
    tree = parse(file)
    imported = imports_of(tree, module_name(file), file.name == "__init__.py")
    assert [name for name in imported if any(within(name, package) for package in RUNS_CODE)] == []
    assert forbidden_calls(tree) == []


@pytest.mark.parametrize("path", SOURCES)
def test_excepts_are_narrow(path: str) -> None:
    """No file catches every exception, except the files listed here."""
    found = broad_excepts(parse(SOURCES[path]))
    if path in BROAD_EXCEPTS_ALLOWED:
        assert found, "it catches narrowly now: take it off the list"
    else:
        assert found == []


def test_what_serves_loads_no_engine() -> None:
    """A process that has imported every module of actorserve has not loaded torch, NVML, transformers or workers."""
    modules = [name for name in MODULES if within(name, "actorserve")]
    modules.remove("actorserve.__main__")  # importing it runs the command line
    program = (
        f"import importlib, sys\nfor name in {modules!r}: importlib.import_module(name)\n"
        f"print(*sorted(set({SERVING_NEVER!r}) & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == ""


def test_a_worker_loads_torch_with_its_engine() -> None:
    """A worker loads torch, which takes seconds, not before its engine needs it and the worker has said so."""
    program = "import sys, workers.worker\nprint('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "False"), done.stderr


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("actorserve.core.kv.x", "import time"),
        ("actorserve.core.kv.x", "from actorserve.core.instance.state import InstanceState"),
        ("actorserve.core.scheduling.x", "from actorserve.core import placement"),
        ("actorserve.core.x", "import numpy"),
        ("actorserve.core.x", "def f():\n    from actorserve.wire import codec"),
        ("actorserve.core.x", "from .. import settings"),
        ("actorserve.wire.x", "from actorserve import actors"),
        ("actorserve.actors.x", "import actorserve.http.app"),
        ("actorserve.http.x", "import torch.nn"),
        ("actorserve.programs.x", "from actorserve.sim import simulation"),
        ("actorserve.cli", "from actorserve.http import app"),
        ("actorserve.x", "from actorserve import errors"),
        ("actorserve.cli", "from workers.devices import Device"),
        ("workers.x", "from actorserve import http"),
    ],
)
def test_a_wrong_import_is_found(module: str, source: str) -> None:
    """The rule above finds an import in the wrong direction, in all of its forms."""
    assert wrong_imports(module, imports_of(ast.parse(source), module, is_package=False)) != []


@pytest.mark.parametrize("clause", ["except:", "except Exception:", "except (OSError, BaseException) as e:"])
def test_a_broad_except_is_found(clause: str) -> None:
    """The rule above finds an except that catches everything, in all of its forms."""
    assert broad_excepts(ast.parse(f"try:\n    pass\n{clause}\n    pass")) == ["line 3"]
