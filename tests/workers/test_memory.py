"""An engine's needs are compared with the available memory, and the rest sizes the pool."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from actorserve.errors import SettingsError
from actorserve.host import ResidentMemory
from actorserve.model_files.description import ModelDescription, TensorSpec
from actorserve.model_files.packing import PackedIntegers
from workers import memory, native, pool_watch
from workers.engine_options import EngineOptions
from workers.kernels.choose import Kernels
from workers.kernels.linear import PackedLinear, PlainLinear
from workers.kernels.numerics import numerics
from workers.kv.shared_memory import SharedMemory, resident_shared_bytes
from workers.memory import MemoryNeeds, MemoryPlan, weights_bytes
from workers.pool_watch import PoolWatch

CPU = torch.device("cpu")
GIB = 2**30
HUGE_PAGE_BYTES = 2**21
NEEDS = MemoryNeeds(
    weights_bytes=2 * GIB,
    activation_bytes=GIB,
    bytes_per_token=2**19,  # 2048 tokens of it are a GiB
    context_tokens=8192,
)


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """The host's available memory and this process's part of it, as figures that a test may change."""
    figures = {"available": 16 * GIB, "total": 2 * GIB, "private": 2 * GIB, "shared": 0}
    for module in (memory, pool_watch):
        monkeypatch.setattr(module, "available_memory_bytes", lambda *_: figures["available"])
    monkeypatch.setattr(memory, "resident_memory", lambda *_: ResidentMemory(figures["total"], figures["private"]))
    monkeypatch.setattr(pool_watch, "resident_shared_bytes", lambda: figures["shared"])
    return figures


def test_the_pool_is_half_of_what_is_left(host: dict[str, int]) -> None:
    """The pool gets half of the share, or of the free memory, after this process's memory and activations."""
    host |= {"total": 0, "private": 0}
    plan, unlimited = (
        MemoryPlan(CPU, NEEDS, EngineOptions(memory_bytes=8 * GIB)),
        MemoryPlan(CPU, NEEDS, EngineOptions()),
    )
    plan.check()
    host |= {"total": 2 * GIB, "private": 2 * GIB, "available": 14 * GIB}
    assert plan.pool_bytes() == 5 * GIB // 2
    assert unlimited.pool_bytes() == 13 * GIB // 2


def test_a_share_does_not_shrink_when_other_workers_fill_their_pools(host: dict[str, int]) -> None:
    """A worker that starts again while another has filled its pool gets the same pool as before."""
    plan = MemoryPlan(CPU, NEEDS, EngineOptions(memory_bytes=8 * GIB))
    first = plan.pool_bytes()
    host["available"] = 5 * GIB
    plan.check()
    assert plan.pool_bytes() == first


@pytest.mark.parametrize("share", [8 * GIB, None])
def test_a_start_that_maps_its_weights_gets_the_same_pool(host: dict[str, int], share: int | None) -> None:
    """Mapped weights that were not read yet give the same pool as weights that were computed just now."""
    pools = []
    for resident, written in ((3 * GIB, 2 * GIB), (GIB // 4, 0)):  # made from mapped files; mapped and little read
        host |= {"total": GIB // 2, "private": GIB // 4, "available": 16 * GIB}
        plan = MemoryPlan(CPU, NEEDS, EngineOptions(memory_bytes=share))
        host["total"] += resident
        host["private"] += written
        host["available"] -= resident
        pools.append(plan.pool_bytes())
    limit = share or 16 * GIB + GIB // 2
    assert pools == [(limit - GIB // 2 - 2 * GIB - GIB) // 2] * 2


def described(*, tied: bool) -> ModelDescription:
    """A table of 1000 numbers, an output layer of as many or none, and a layer of 160."""
    shapes = {"model.embed_tokens": (100, 10), "model.layers.0.mlp.up_proj": (16, 10)}
    if not tied:
        shapes["lm_head"] = (100, 10)
    tensors = tuple(TensorSpec(f"{name}.weight", shape, name, shape) for name, shape in shapes.items())
    return cast(ModelDescription, SimpleNamespace(tensors=tensors, config=SimpleNamespace(tie_word_embeddings=tied)))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("mode", "has_native", "isa", "expected_bytes"),
    [
        ("int8", True, "avx2", 2 * 1000 + 1000 + 160),
        ("int4", True, "avx2", 2 * 1000 + 1000 + 90),
        ("int4", False, "avx512_vnni", 2 * 1000 + 2 * 1000 + 90 + 160),
        ("int8", False, "avx2", 2 * 1000 + 5 * 1000 + 5 * 160),
        ("int8", False, "", 2 * 1000 + 5 * 1000 + 5 * 160),
    ],
)
def test_weights_count_in_the_engines_form(
    monkeypatch: pytest.MonkeyPatch, mode: str, has_native: bool, isa: str, expected_bytes: int, tied: bool
) -> None:
    """The table counts in its dtype, the output layer in its bits even if tied, and unpacked copies count too."""
    monkeypatch.setattr(native, "isa", lambda: isa)
    kernels = Kernels(numerics(mode, CPU), CPU, native=has_native)
    assert weights_bytes(described(tied=tied), kernels) == expected_bytes


def test_float_weights_count_in_the_engines_form(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tied table counts once if the layer uses it directly, and twice if the layer packs it."""
    kernels = Kernels(numerics("float32", CPU), CPU, native=True)
    for layer, copies in ((PackedLinear, 2), (PlainLinear, 1)):
        monkeypatch.setattr("workers.kernels.choose.linear_class", lambda *_, layer=layer: layer)
        assert weights_bytes(described(tied=True), kernels) == 4 * (copies * 1000 + 160)


def test_packed_weights_count_in_their_own_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A quantized checkpoint's weights count in their own bits where kernels compute with them, else as floats."""
    description = described(tied=False)
    table, layer, head = description.tensors
    packed = (table, layer._replace(packing=PackedIntegers("awq", 4, 128)), head)
    kernels = Kernels(numerics("bfloat16", CPU), CPU, native=False)
    for runs_grouped, layer_bytes in ((False, 2 * 160), (True, 160 // 2)):
        monkeypatch.setattr(Kernels, "runs_grouped", runs_grouped)
        changed = SimpleNamespace(tensors=packed, config=description.config)
        found = weights_bytes(cast(ModelDescription, changed), kernels)
        assert found == 2 * 1000 + 2 * 1000 + layer_bytes


def test_a_fixed_pool_has_its_size(host: dict[str, int]) -> None:
    """The pool has workers.kv_cache_bytes, if the worker's share holds them."""
    plan = MemoryPlan(CPU, NEEDS, EngineOptions(memory_bytes=8 * GIB, kv_cache_bytes=3 * GIB))
    plan.check()
    assert plan.pool_bytes() == 3 * GIB
    with pytest.raises(SettingsError, match=r"KV cache 6\.00 GiB.* there are 8\.00 GiB; .*workers\.kv_cache_bytes"):
        MemoryPlan(CPU, NEEDS, EngineOptions(memory_bytes=8 * GIB, kv_cache_bytes=6 * GIB)).check()


@pytest.mark.parametrize(("share", "available"), [(3 * GIB, 16 * GIB), (8 * GIB, 3 * GIB)])
def test_too_little_memory_is_an_error_before_loading(host: dict[str, int], share: int, available: int) -> None:
    """One line names the needed memory and its purposes, the available memory, and settings to change."""
    host["available"] = available
    with pytest.raises(SettingsError) as caught:
        MemoryPlan(CPU, NEEDS, EngineOptions(memory_bytes=share)).check()
    message = str(caught.value)
    assert "\n" not in message
    for part in ("4.00 GiB are needed", "weights 2.00 GiB", "at least 1.00 GiB", "there are 3.00 GiB", "model.dtype"):
        assert part in message


def test_too_little_memory_is_an_error_after_loading(host: dict[str, int]) -> None:
    """If weights turn out larger than expected and leave no memory for a pool, the error says so."""
    host |= {"total": GIB // 2, "private": GIB // 2}
    plan = MemoryPlan(CPU, NEEDS, EngineOptions(memory_bytes=8 * GIB))
    host |= {"total": 7 * GIB, "private": 7 * GIB}
    with pytest.raises(SettingsError, match=r"0\.00 GiB are left.* 2\.00 GiB are needed; .*workers\.memory_bytes"):
        plan.pool_bytes()


def test_a_host_pool_takes_its_part_of_the_share(host: dict[str, int]) -> None:
    """On a CPU the swap pool has the size of the settings, or does not exist; the KV cache gets the rest."""
    host |= {"total": 0, "private": 0}
    plan = MemoryPlan(CPU, NEEDS, EngineOptions(memory_bytes=8 * GIB, host_kv_bytes=2 * GIB))
    plan.check()
    assert (plan.pool_bytes(), plan.host_pool_bytes(GIB)) == (3 * GIB // 2, 2 * GIB)
    assert MemoryPlan(CPU, NEEDS, EngineOptions(memory_bytes=8 * GIB)).host_pool_bytes(GIB) == 0
    with pytest.raises(SettingsError, match=r"9\.00 GiB are needed .*KV swapped 5\.00 GiB.*workers\.host_kv_bytes"):
        MemoryPlan(CPU, NEEDS, EngineOptions(memory_bytes=8 * GIB, host_kv_bytes=5 * GIB)).check()


def test_a_gpus_host_pool_is_bounded_by_the_hosts_memory(host: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's host pool is as large as its KV pool, within a quarter of the worker's share; a fixed one must fit."""
    monkeypatch.setattr(memory, "free_bytes", lambda _: 40 * GIB)
    cuda = torch.device("cuda")
    plan = MemoryPlan(cuda, NEEDS, EngineOptions(memory_bytes=8 * GIB))
    plan.check()
    assert [plan.host_pool_bytes(size * GIB) for size in (1, 20)] == [GIB, 2 * GIB]
    assert (
        MemoryPlan(cuda, NEEDS, EngineOptions(host_kv_bytes=0)).pool_bytes() > plan.pool_bytes()
    )  # no room for staging
    assert MemoryPlan(cuda, NEEDS, EngineOptions(host_kv_bytes=7 * GIB)).host_pool_bytes(GIB) == 7 * GIB
    with pytest.raises(SettingsError, match=r"9\.00 GiB are wanted.* 8\.00 GiB for this.*workers\.host_kv_bytes"):
        MemoryPlan(cuda, NEEDS, EngineOptions(memory_bytes=8 * GIB, host_kv_bytes=9 * GIB)).check()


def test_usable_blocks_follow_the_available_memory(host: dict[str, int]) -> None:
    """Usable blocks are those already written, and this worker's part of the memory beyond the reserve."""
    watch = PoolWatch(num_blocks=100, bytes_per_block=2**26, num_workers_on_host=2)  # the reserve is 512 MiB
    assert watch.num_usable_blocks() == 100
    host["shared"] += 40 * 2**26
    host["available"] = GIB // 2 + 20 * 2**26
    assert watch.num_usable_blocks() == 40 + 10
    host["available"] = 0
    assert watch.num_usable_blocks() == 40
    host["available"] = 16 * GIB
    assert watch.num_usable_blocks() == 100


def test_memory_is_kept_for_swap_blocks(host: dict[str, int]) -> None:
    """Memory goes first to swap blocks that were not written yet, and written swap blocks do not count as KV cache."""
    watch = PoolWatch(num_blocks=100, bytes_per_block=2**26, num_workers_on_host=1, num_host_blocks=30)
    host["shared"] += 40 * 2**26
    host["available"] = GIB // 2 + 50 * 2**26
    assert watch.num_usable_blocks() == 40 + 50 - 30
    assert watch.num_usable_blocks(num_written_host_blocks=10) == 30 + 50 - 20
    host["available"] = 0
    assert watch.num_usable_blocks(num_written_host_blocks=10) == 30


def test_a_small_host_keeps_a_small_reserve(host: dict[str, int]) -> None:
    """The reserve is an eighth of the memory that was available at first if that is less than 512 MiB."""
    host["available"] = GIB
    watch = PoolWatch(num_blocks=100, bytes_per_block=2**24, num_workers_on_host=1)
    assert watch.num_usable_blocks() == 7 * GIB // 8 // 2**24


def test_pages_become_resident_as_they_are_written() -> None:
    """Only written pages of this process's own shared memory count, no reserved pages or mapped memory of others."""
    before = resident_shared_bytes()
    pool, other = SharedMemory(2**28), SharedMemory(2**24)
    assert resident_shared_bytes() == before
    torch.frombuffer(pool.buffer, dtype=torch.int8)[: 2**25] = 1
    assert 2**25 <= pool.resident_bytes <= 2**25 + HUGE_PAGE_BYTES
    assert resident_shared_bytes() - before == pool.resident_bytes
    program = (
        "import sys; from workers.kv.shared_memory import attach, resident_shared_bytes\n"
        "print(sum(attach(sys.argv[1], 2**28)[: 2**20]), resident_shared_bytes())"
    )
    done = subprocess.run([sys.executable, "-c", program, pool.shown], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(2**20), "0"]
    del pool
    assert resident_shared_bytes() == before + other.resident_bytes


def test_the_host_is_read_from_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A watch reads the memory figures under its ``root``."""
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "meminfo").write_text("MemAvailable: 1024 kB\n")
    monkeypatch.setattr(pool_watch, "resident_shared_bytes", lambda: 2048)
    watch = PoolWatch(num_blocks=1000, bytes_per_block=1024, num_workers_on_host=1, root=tmp_path)
    assert watch.num_usable_blocks() == 1024 - 128 + 2
