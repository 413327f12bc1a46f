"""tools/bench kernels: every Triton kernel compiles for every GPU, and one layer's kernels share an instruction."""

import json
from functools import cache, partial
from pathlib import Path

import pytest

from tests.tools.benchmarks.run_bench import run_bench
from tests.workers.triton import INTERPRETED, needs_triton
from tools.benchmarks.kernels.compiled import Compiled, compile_launches
from tools.benchmarks.kernels.gpus import GPUS, programs_at_once
from tools.benchmarks.kernels.launches import LAUNCHES

pytestmark = [needs_triton, pytest.mark.skipif(INTERPRETED, reason="nothing is compiled in the interpreter's process")]

INSTRUCTIONS = {80: "mma.sync", 90: "wgmma", 100: "tcgen05", 120: "mma.sync"}
SUMS_WEIGHTS = "mma.sync"  # attention's weights, by a product with ones
EVERYWHERE = ("attention 32/8 x 128", "linear 128 x 256", "linear 64 x 16")


@cache
def compiled(name: str, capability: int) -> list[Compiled]:
    return compile_launches(partial(LAUNCHES[name], capability), capability)


def instructions(kernel: Compiled) -> set[str]:
    """The instructions by which the kernel multiplies, without their shapes."""
    return {instruction.split()[0] for instruction in kernel.instructions}


@pytest.mark.parametrize("name", LAUNCHES)
def test_no_kernel_spills_registers_on_hopper(name: str) -> None:
    """On sm_90 every thread's numbers fit its registers, and each processor has room for a program."""
    kernels = compiled(name, 90)
    assert kernels
    for kernel in kernels:
        assert kernel.spilled_bytes == 0, kernel.kernel
        assert 0 < kernel.registers <= 255
        assert programs_at_once(kernel) >= 1


@pytest.mark.parametrize("capability", GPUS)
def test_prefill_and_decode_multiply_by_the_same_instructions(capability: int) -> None:
    """On each GPU, attention takes the same instructions in prefill and decode, because others may round otherwise."""
    decode, _, prefill = compiled("attention 32/8 x 128", capability)
    assert instructions(decode) == instructions(prefill) == {INSTRUCTIONS[capability], SUMS_WEIGHTS}


@pytest.mark.parametrize("capability", GPUS)
def test_every_tile_of_a_linear_layer_multiplies_by_the_same_instruction(capability: int) -> None:
    """On each GPU, tiles for few rows and for many take one instruction, because others may round otherwise."""
    for name in ("linear 128 x 256", "linear 64 x 16"):
        (kernel,) = compiled(name, capability)
        assert instructions(kernel) == {INSTRUCTIONS[capability]}


@pytest.mark.parametrize("capability", GPUS)
def test_every_kernel_has_room_on_every_gpu(capability: int) -> None:
    """The widest heads and the largest tiles fit the shared memory of each kind of GPU."""
    for name in ("attention 8/4 x 256", *EVERYWHERE):
        assert all(programs_at_once(kernel) >= 1 for kernel in compiled(name, capability))


def test_prefill_and_decode_have_instructions_of_the_same_shape() -> None:
    """On sm_90 each product of attention has one shape of instruction in prefill and decode."""
    for name in ("attention 32/8 x 128", "attention 9/3 x 64", "attention 8/4 x 256"):
        decode, _, prefill = compiled(name, 90)
        assert decode.instructions == prefill.instructions
        assert all(shape.endswith("k16") for shape in decode.instructions)


def test_float32_is_not_rounded_to_tf32() -> None:
    """float32 is multiplied in float32, and not by the tensor cores, which would round it."""
    for kernel in compiled("attention 32/8 x 128 float32", 90):
        assert not kernel.instructions
        assert "tf32" not in kernel.ptx


def test_no_kernel_fuses_products_and_sums_by_itself() -> None:
    """A compiler that fuses a product and a sum in one kernel and not in another would change bits, so none may."""
    for name in EVERYWHERE:
        for kernel in compiled(name, 90):
            assert not kernel.fuses


def test_programs_at_once_follow_the_scarcest_resource() -> None:
    """Registers, shared memory and warps each limit how many programs a processor holds."""

    def kernel(capability: int, warps: int, registers: int, shared_bytes: int) -> int:
        return programs_at_once(Compiled("k", capability, warps, registers, 0, shared_bytes, (), False, ""))

    assert kernel(90, 4, 255, 0) == 2
    assert kernel(90, 4, 32, 100 * 1024) == 2
    assert kernel(90, 8, 24, 0) == 8
    assert kernel(120, 4, 32, 100 * 1024) == 0


def test_the_command_writes_figures(tmp_path: Path) -> None:
    """``tools/bench kernels`` prints a table and writes a figure for each kernel; unknown GPUs are refused."""
    file = tmp_path / "kernels.json"
    done = run_bench("kernels", "--capabilities", "90", "--json", str(file))
    assert done.returncode == 0, done.stderr
    tables = json.loads(file.read_text(encoding="utf-8"))["tables"]
    assert [len(table["columns"]) for table in tables] == [1, 1, 1]
    assert {row["name"].split(":")[0] for row in tables[0]["rows"]} == set(LAUNCHES)
    refused = run_bench("kernels", "--capabilities", "70")
    assert refused.returncode != 0
    assert "70" in refused.stderr
