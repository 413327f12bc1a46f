"""A step on a GPU launches few kernels, copies once in and once out, and waits for nothing: counted without a GPU."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from tests.workers.small_models import ARCHITECTURES
from tests.workers.triton import HAS_TRITON, INTERPRETED
from tools.benchmarks.engine.launch_counter import DEVICE, counting
from tools.benchmarks.engine.launches import SHAPES, count_model, table_of

pytestmark = pytest.mark.skipif(not HAS_TRITON or INTERPRETED, reason="needs the package triton")

MAX_LAUNCHES_A_LAYER = 15


def small_shape(architecture: str) -> dict[str, Any]:
    """The config.json of a small model, whose layers are all of one kind."""
    class_name, settings = ARCHITECTURES[architecture]
    shape: dict[str, Any] = json.loads(getattr(transformers, class_name)(**settings).to_json_string(use_diff=False))
    shape.pop("layer_types", None)  # they would name as many layers as the model has
    return shape


def check(name: str, shape: dict[str, Any]) -> None:
    counts = count_model(name, shape | {"num_hidden_layers": 3}, num_requests=5)
    assert 0 < counts.layer <= MAX_LAUNCHES_A_LAYER
    assert counts.step.num_launches <= 3 * counts.layer + 15
    assert (counts.step.copies_in, counts.step.copies_out, counts.step.waits) == (1, 1, 0)
    assert counts.step.launches["_place_heads"] == 3
    assert counts.step.launches["_linear"] + counts.step.launches["grouped_linear"] >= 3 * 4
    assert not {"addmm", "mm", "bmm"} & set(counts.step.launches), "torch multiplies in another order for each batch"
    (row,) = table_of([counts]).rows
    assert [cell.median for cell in row.cells if cell is not None][2:] == [1, 1, 0]


@pytest.mark.parametrize("name", SHAPES)
def test_a_step_is_cheap_in_launches(name: str) -> None:
    """A layer is at most 15 launches; a step is one copy in and one out, and waits for neither."""
    check(name, SHAPES[name])


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_step_of_any_family_is_cheap_in_launches(architecture: str) -> None:
    """The same holds for every architecture that is served."""
    check(architecture, small_shape(architecture))


def on_device(*shape: int) -> Tensor:
    return torch.zeros(shape, device=DEVICE)


def on_host(*shape: int) -> Tensor:
    return torch.zeros(shape)


@pytest.mark.parametrize(
    ("work", "expected"),
    [
        (lambda: torch.nn.functional.linear(on_device(2, 3), on_device(4, 3)), (3, 0, 0, 0)),
        (lambda: on_device(2, 3)[1:].view(-1).unsqueeze(0), (1, 0, 0, 0)),
        (lambda: on_device(2).add_(1).float(), (2, 0, 0, 0)),
        (lambda: on_host(2).add(1).tolist(), (0, 0, 0, 0)),
        (lambda: torch.empty(3, device=DEVICE).copy_(on_host(3), non_blocking=True), (0, 1, 0, 0)),
        (lambda: torch.empty(3, device=DEVICE).copy_(on_host(3)), (0, 1, 0, 1)),
        (lambda: on_host(2).to(DEVICE), (0, 1, 0, 1)),
        (lambda: torch.tensor([1, 2], device=DEVICE), (0, 1, 0, 1)),
        (lambda: torch.empty(2, device=DEVICE).cpu(), (0, 0, 1, 1)),
        (lambda: torch.empty(2, device=DEVICE).to("cpu", non_blocking=True), (0, 0, 1, 0)),
        (lambda: torch.empty(2, device=DEVICE).tolist(), (0, 0, 1, 1)),
        (lambda: int(torch.empty(2, device=DEVICE)[0]), (0, 0, 1, 1)),
        (lambda: bool(torch.empty(2, device=DEVICE)[0] > 0), (1, 0, 1, 1)),
    ],
)
def test_what_a_gpu_would_do_is_counted(work: Callable[[], object], expected: tuple[int, int, int, int]) -> None:
    """Operations and copies of the device count once, views and work on the host do not, and reading a number waits."""
    with counting() as counts:
        work()
    assert (counts.num_launches, counts.copies_in, counts.copies_out, counts.waits) == expected
