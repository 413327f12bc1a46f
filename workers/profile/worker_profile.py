"""The worker's profile: the file that settings name, else one that was measured for this engine before, else a quick
measurement at the first start, kept in the cache for later ones.

A measured profile is found by the model, the numeric mode, the threads, the CPU or GPU, and the engine's kind. One
process of a host measures at a time, because two would disturb each other. Waiting processes then load the profile that
the first one wrote.
"""

import fcntl
import logging
import platform
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from actorserve.core.timing.profile import Curve, Link, Profile
from actorserve.errors import ProfileError
from actorserve.local_trust import check_file, open_lock, trusted_folder
from actorserve.model_files.default_model import cache_folder
from actorserve.processes.status import Reporter
from actorserve.profile_files import MAX_DRIFT, drift_of, load_profile, require_profile_of, save_profile
from actorserve.settings import Settings
from workers.engine import Engine
from workers.engines.fake_engine import FakeEngine
from workers.profile.fit import Facts, make_profile, measured_shapes
from workers.profile.measure import QUICK, measure
from workers.profile.plans import quick_plan

_log = logging.getLogger(__name__)

_FAKE_ITERATION_S = 0.005
_CPUINFO = Path("/proc/cpuinfo")


def profile_of(engine: Engine, settings: Settings, status: Reporter) -> Profile:
    """The engine's profile; ``settings`` are resolved. Call this before the engine serves: it overwrites its KV pool.

    Raises: ProfileError if the settings name a profile that does not exist, is invalid, or belongs to another model.
    """
    given = settings.workers.profile
    if given is not None:
        loaded = load_profile(given.expanduser())
        require_profile_of(loaded, given, engine.model.name, kv_bytes_per_token(engine))
        _warn_of_drift(loaded, given)
        return loaded
    if isinstance(engine, FakeEngine):
        return fake_profile(engine)
    facts = facts_of(settings)
    file = profile_file(engine, facts)
    if (kept := _kept(file, engine)) is not None:
        return kept
    with _alone(file.parent, status):
        # Another process may have measured meanwhile.
        return _kept(file, engine) or _measure(engine, facts, settings, file, status)


def fake_profile(engine: Engine) -> Profile:
    """Every iteration takes the same time."""
    always = Curve((1.0, 2.0), (_FAKE_ITERATION_S, _FAKE_ITERATION_S))
    memory = Link(0.0, 1e9)
    return Profile(
        name="fake",
        model=engine.model.name,
        hardware="none",
        dtype="none",
        prefill=always,
        prefill_context_s=0.0,
        decode=always,
        decode_context=Curve((0.0, 1.0), (0.0, 0.0)),
        swap=memory,
        transfer=memory,
        kv_bytes_per_token=kv_bytes_per_token(engine),
    )


def kv_bytes_per_token(engine: Engine) -> int:
    return engine.bytes_per_block * engine.layer_groups.num_groups // engine.tokens_per_block


def facts_of(settings: Settings) -> Facts:
    """The hardware and the numeric mode of the engine that these resolved settings describe."""
    import torch

    from workers.kernels.numerics import numerics

    on_gpu = settings.workers.device == "cuda"
    device = torch.device("cuda" if on_gpu else "cpu")
    return Facts(
        dtype=numerics(settings.model.dtype, device).name,
        hardware=torch.cuda.get_device_name(device) if on_gpu else cpu_name(),
        threads=0 if on_gpu else settings.workers.threads or 1,
    )


def cpu_name(cpuinfo: Path = _CPUINFO) -> str:
    """The CPU's own name, or its architecture if it gives none (as on Arm)."""
    try:
        text = cpuinfo.read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    named = re.search(r"^model name\s*:\s*(.+?)\s*$", text, re.MULTILINE)
    return named.group(1) if named else platform.machine() or "unknown CPU"


def profile_file(engine: Engine, facts: Facts) -> Path:
    """Where this engine's measured profile is kept."""
    where = f"{facts.threads}-threads-{facts.hardware}" if facts.threads else facts.hardware
    words = re.sub(r"[^a-z0-9.]+", "-", f"{engine.model.name}-{facts.dtype}-{where}".lower()).strip("-.")
    return cache_folder() / "profiles" / f"{words[:120]}-{engine.kind[:8]}.toml"


def describe_profile(engine: Engine, facts: Facts) -> str:
    """A measured profile's name, for people."""
    threads = f", {facts.threads} threads" if facts.threads else ""
    return f"{engine.model.name} in {facts.dtype} on {facts.hardware}{threads}"


def _kept(file: Path, engine: Engine) -> Profile | None:
    if not file.exists():
        return None
    trusted_folder(file.parent)
    check_file(file)
    try:
        profile = load_profile(file)
        require_profile_of(profile, file, engine.model.name, kv_bytes_per_token(engine))
    except ProfileError as error:
        _log.warning("measuring again: %s", error)
        return None
    _log.info("profile %s", file)
    _warn_of_drift(profile, file)
    return profile


def _warn_of_drift(profile: Profile, file: Path) -> None:
    """The scheduler corrects its times while it runs, so a doubtful profile is better than no service."""
    if drift_of(profile) > MAX_DRIFT:
        _log.warning(
            "the machine's speed changed by %.0f %% while the profile %s was measured; tools/profile measures it again",
            100 * drift_of(profile),
            file,
        )


def _measure(engine: Engine, facts: Facts, settings: Settings, file: Path, status: Reporter) -> Profile:
    limits = settings.workers.batch_limits()
    plan = quick_plan(engine, limits.tokens, limits.requests)
    what = "measuring the engine's speed (once)"
    found = measure(engine, plan, QUICK, lambda share, _: status.loading(what, share))
    profile = make_profile(describe_profile(engine, facts), engine.model.name, facts, kv_bytes_per_token(engine), found)
    profile = replace(profile, num_layers=engine.kv.num_layers)
    try:
        heading = "Measured quickly at the first start; tools/profile measures thoroughly."
        save_profile(profile, file, heading, measured_shapes(found))
        _log.info("measured a profile, kept in %s", file)
    except OSError as error:
        _log.warning("the profile cannot be kept in %s: %s", file, error)
    _warn_of_drift(profile, file)
    return profile


@contextmanager
def _alone(folder: Path, status: Reporter) -> Iterator[None]:
    """Measure while no other process of this host does, if the cache can be written to."""
    try:
        trusted_folder(folder)
        lock = open_lock(folder / "measuring.lock")
    except OSError as error:
        _log.warning("other processes may measure at the same time: %s", error)
        yield
        return
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            status.loading("waiting for another worker to measure the engine's speed")
            fcntl.flock(lock, fcntl.LOCK_EX)
        for partial in folder.glob("partial-*"):
            partial.unlink(missing_ok=True)  # left by a killed process
        yield
