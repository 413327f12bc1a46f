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
WIDEST = ("attention 8/4 x 256", "attention 32/8 x 128", "linear 128 x 256", "linear 64 x 16", "int8 linear 64 x 128")
ROW_OPERATIONS = tuple(name for name in LAUNCHES if name.startswith(("rows", "heads")))
CHOICES_OF_TOKENS = tuple(name for name in LAUNCHES if name.startswith("choice"))
WITHOUT_PRODUCTS = (*ROW_OPERATIONS, "plan", "128 experts, 8 a token", *CHOICES_OF_TOKENS)
MANY_TILES = ("linear", "int4 linear", "int8 linear", "FP8 linear", "experts")


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
@pytest.mark.parametrize("form", MANY_TILES)
def test_every_tile_of_a_linear_layer_multiplies_by_the_same_instruction(form: str, capability: int) -> None:
    """On each GPU, tiles for few rows and for many take one instruction, because others may round otherwise."""
    names = [name for name in LAUNCHES if name.startswith(f"{form} 64 x") or name == f"{form} 128 x 256"]
    for name in (names[0], names[-1]):
        (kernel,) = compiled(name, capability)
        assert instructions(kernel) == {INSTRUCTIONS[capability]}


@pytest.mark.parametrize("capability", GPUS)
@pytest.mark.parametrize("name", WIDEST)
def test_every_kernel_has_room_on_every_gpu(name: str, capability: int) -> None:
    """The widest heads and the largest tiles fit the shared memory of each kind of GPU."""
    assert all(programs_at_once(kernel) >= 1 for kernel in compiled(name, capability))


@pytest.mark.parametrize("capability", GPUS)
@pytest.mark.parametrize("name", WITHOUT_PRODUCTS)
def test_kernels_without_products_hardly_spill(name: str, capability: int) -> None:
    """On each GPU, norms, gates, heads and plans fit their registers; choices lack at most two of them."""
    for kernel in compiled(name, capability):
        assert kernel.spilled_bytes <= (8 if name in CHOICES_OF_TOKENS else 0), kernel.kernel
        assert programs_at_once(kernel) >= 1


@pytest.mark.parametrize("name", ROW_OPERATIONS)
def test_row_operations_load_vectors(name: str) -> None:
    """All row operations but the softmax of a few numbers load several numbers by one instruction."""
    for kernel in compiled(name, 90):
        assert ("ld.global.v" in kernel.ptx) == (kernel.kernel != "softmax"), kernel.kernel


@pytest.mark.parametrize("name", LAUNCHES)
def test_an_entry_compiles_each_kernel_once(name: str) -> None:
    """The table names a row by its entry and its kernel, so an entry has one configuration of each kernel."""
    kernels = [kernel.kernel for kernel in compiled(name, 90)]
    assert len(set(kernels)) == len(kernels)


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
    for name in WIDEST:
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
