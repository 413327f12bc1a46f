"""Replaying a journal: a new core from the same recipe has the same effects, and any difference is noticed."""

import io
import json
import math
import struct
from collections.abc import Callable
from dataclasses import replace

import msgpack
import pytest

from actorserve.core.cluster.config import ClusterConfig
from actorserve.core.cluster.scaling import ScalingConfig
from actorserve.core.gateway.config import GatewayConfig
from actorserve.core.instance.config import InstanceConfig
from actorserve.core.messages import (
    PROTOCOL_VERSION,
    Message,
    Open,
    Peer,
    PeerUp,
    RequestSpec,
    Role,
    SamplingParams,
    Start,
    StepDone,
    Tick,
)
from actorserve.core.migration.pairing import PairingConfig
from actorserve.core.recipes import InstanceRecipe, Recipe
from actorserve.core.replay import make_core
from actorserve.core.scheduling.swapping import SwapMode
from actorserve.core.timing.profile import Curve, Link, Profile
from actorserve.errors import ProtocolError
from actorserve.wire.journal import Entry, digest, read_entries, write_effects, write_entry, write_recipe
from actorserve.wire.recipes import parse_recipe, recipe_text
from actorserve.wire.replay import replay

GATEWAY = Peer("gateway-0", 1)
PROFILE = Profile(
    name="n",
    model="m",
    hardware="h",
    prefill=Curve((1.0, 8.0), (0.1, 1 / 3)),
    prefill_context_s=1e-9 / 3,
    decode=Curve((1.0,), (0.1,)),
    decode_context=Curve((0.0, 7.0), (0.0, 2e-5 / 7)),
    swap=Link(1e-4, 1e10 / 3),
    transfer=Link(1e-4, 2e10 / 7),
    kv_bytes_per_token=100,
    errors=(("fit", 0.125),),
)
INSTANCE = InstanceRecipe(
    InstanceConfig(
        num_blocks=8,
        tokens_per_block=4,
        bytes_per_block=400,
        max_context_tokens=32,
        max_batch_requests=4,
        max_batch_tokens=24,
        load_report_s=0.5,
        retry_s=1.0,
        tpot_target_s=math.inf,
        headroom_bytes={-1: 5},
        num_host_blocks=6,
        swap_mode=SwapMode.REACTIVE,
    ),
    PROFILE,
    "skip_join_mlfq",
    promote_after_s=0.7,
    promote_after_s_of={3: 1.5},
)
ORIGINS: list[Recipe] = [
    INSTANCE,
    ClusterConfig(10, 1.0, promote_after_s_of={0: 2.0}),
    ClusterConfig(10, 1.0, dispatch="round_robin", migration=PairingConfig(1.5), scaling=ScalingConfig(3, hold_s=0.1)),
    GatewayConfig(1.0, 30.0, 600.0),
]
SPEC = RequestSpec("r", (1, 2, 3), SamplingParams(seed=2**64 - 1, max_tokens=2))


@pytest.mark.parametrize("recipe", ORIGINS)
def test_a_recipe_reads_back(recipe: Recipe) -> None:
    """A recipe reads back equal, including infinities and the last bits of numbers."""
    assert parse_recipe(recipe_text(recipe)) == recipe


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"kind": "gateway"}', '{"kind": "x", "promote_after_s_of": {}}'])
def test_a_damaged_recipe_is_refused(text: str) -> None:
    """A text that is not a recipe raises ProtocolError."""
    with pytest.raises(ProtocolError):
        parse_recipe(text)


@pytest.mark.parametrize(
    ("version", "named"), [(PROTOCOL_VERSION - 1, f"version {PROTOCOL_VERSION - 1}"), (None, "an older version")]
)
def test_a_log_of_another_version_is_refused(version: int | None, named: str) -> None:
    """Messages of another version have other fields, so their log is refused before any of them is read."""
    values = json.loads(recipe_text(INSTANCE)) | {"protocol_version": version}
    with pytest.raises(ProtocolError, match=f"messages of {named}, and this program reads version {PROTOCOL_VERSION}"):
        parse_recipe(json.dumps(values))


def _inputs(recipe: Recipe) -> list[tuple[Message, Peer | None]]:
    if isinstance(recipe, InstanceRecipe):
        return [
            (PeerUp(GATEWAY, Role.GATEWAY), None),
            (Start(1, SPEC), GATEWAY),
            (StepDone(1, 0.25, ("r",), (0,), (7,)), None),
            (Tick(), None),
            (StepDone(2, 0.125, ("r",), (1,), (8,)), None),
        ]
    if isinstance(recipe, ClusterConfig):
        return [(PeerUp(GATEWAY, Role.GATEWAY), None), (Tick(), None)]
    return [(PeerUp(Peer("coordinator", 1), Role.COORDINATOR), None), (Open(SPEC), None), (Tick(), None)]


def _recorded(recipe: Recipe, change: Callable[[Entry], Entry] = lambda entry: entry) -> io.BytesIO:
    """The journal that a node writes. ``change`` alters the inputs in the journal only."""
    file, core = io.BytesIO(), make_core(recipe)
    write_recipe(file, recipe_text(recipe))
    for number, (message, sender) in enumerate(_inputs(recipe)):
        write_entry(file, change(Entry(0.5 * number, sender, message)))
        write_effects(file, core.handle(message, 0.5 * number, sender))
    file.seek(0)
    return file


@pytest.mark.parametrize("recipe", ORIGINS)
def test_a_recorded_log_replays(recipe: Recipe) -> None:
    """Every kind of core, made from its journal's recipe, gives the recorded effects for the recorded inputs."""
    result = replay(_recorded(recipe))
    assert result.difference is None
    assert result.num_entries == result.num_compared == len(_inputs(recipe))
    assert result.duration_s == 0.5 * (len(_inputs(recipe)) - 1)
    assert len(list(read_entries(_recorded(recipe)))) == len(_inputs(recipe))


def test_a_difference_is_found() -> None:
    """The replay stops at the first input whose effects differ from the recorded ones, and names it."""

    def change(entry: Entry) -> Entry:
        match entry.message:
            case StepDone(step_id=1) as done:
                return replace(entry, message=replace(done, token_ids=(9,)))
        return entry

    result = replay(_recorded(INSTANCE, change))
    assert result.difference == "input 3, StepDone at 1.000000 s: its effects differ"


def test_a_log_cut_off_by_a_kill_replays() -> None:
    """A journal that is cut off anywhere replays up to its last whole input, whose effects may be missing."""
    data = _recorded(INSTANCE).getvalue()
    found = set()
    for cut in range(len(data) + 1):
        file = io.BytesIO(data[:cut])
        try:
            result = replay(file)
        except ProtocolError:
            assert cut < 5 + len(recipe_text(INSTANCE)) + 4  # not even the recipe is whole
            continue
        assert result.difference is None
        found.add((result.num_entries, result.num_compared))
    assert found == {(n, m) for n in range(6) for m in (n - 1, n) if m >= 0}


def test_another_file_is_refused() -> None:
    """A journal without a recipe, without effects between inputs, or with effects before any input is refused."""
    for records in (
        [[1.0, None, None, b""]],
        [[recipe_text(INSTANCE)], [digest([])]],
        [[recipe_text(INSTANCE)], [recipe_text(INSTANCE)]],
    ):
        bodies = [msgpack.packb(record) for record in records]
        data = b"".join(struct.pack(">I", len(body)) + body for body in bodies)
        with pytest.raises(ProtocolError):
            replay(io.BytesIO(data))
    file = io.BytesIO()
    write_recipe(file, recipe_text(INSTANCE))
    write_entry(file, Entry(0.0, None, Tick()))
    write_entry(file, Entry(0.0, None, Tick()))
    file.seek(0)
    with pytest.raises(ProtocolError, match="no effects of input 1"):
        replay(file)


def test_digests_tell_effects_apart() -> None:
    """Equal effects have equal digests; another number, order or kind has another."""
    effects = make_core(INSTANCE).handle(PeerUp(GATEWAY, Role.COORDINATOR), 0.0)
    assert digest(effects) == digest(list(effects))
    assert len({digest(some) for some in ([], effects, effects * 2, [effects[0], *effects])}) == 3
