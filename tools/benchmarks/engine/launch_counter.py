"""Counts what a step launches on a GPU, without one: tensors on torch's ``meta`` device have shapes and no numbers.

An operation of torch counts as one launch. A few launch several kernels, such as a sort.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

DEVICE = torch.device("meta")

_aten = torch.ops.aten
_NO_LAUNCH = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach", "lift_fresh", "alias")
_WAITS = ("nonzero", "masked_select", "unique", "_unique2", "equal", "is_nonzero")  # their results' sizes, or truth


@dataclass
class Counts:
    """What one step did. ``waits``: how often the host waited for the device, which copies do unless they are said not
    to. ``launches``: by name of the kernel."""

    launches: Counter[str] = field(default_factory=Counter)
    copies_in: int = 0
    copies_out: int = 0
    waits: int = 0

    @property
    def num_launches(self) -> int:
        return self.launches.total()


@contextmanager
def counting() -> Iterator[Counts]:
    """Count what the block does on the ``meta`` device: torch's operations and Triton's kernels, which do not run.

    A number that the host reads from the device is 1. Raises: ImportError without Triton.
    """
    from triton.runtime.jit import KernelInterface

    counts = Counts()

    def launcher(kernel: Any, grid: object) -> Callable[..., None]:
        def launch(*args: object, **kwargs: object) -> None:
            counts.launches[getattr(kernel, "fn", kernel).__name__] += 1

        return launch

    with patch.object(KernelInterface, "__getitem__", launcher), torch.no_grad(), _Made(counts), _Operations(counts):
        yield counts


class _Made(TorchFunctionMode):
    """Tensors that are made on the device from the host's numbers."""

    def __init__(self, counts: Counts) -> None:
        super().__init__()
        self._counts = counts

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in (torch.tensor, torch.as_tensor) and _on_device(result) and not _on_device(args):
            self._counts.copies_in += 1
            self._counts.waits += 1
        return result


class _Operations(TorchDispatchMode):
    """All other operations."""

    def __init__(self, counts: Counts) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._counts = counts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        counts, name = self._counts, func._schema.name.removeprefix("aten::")
        if func is _aten._local_scalar_dense.default and _on_device(args):
            counts.copies_out += 1
            counts.waits += 1
            return 1
        if name in _WAITS and _on_device(args):
            counts.launches[name] += 1
            counts.waits += 1
            return True
        if func is _aten._to_copy.default and _on_device(args) and _leaves(kwargs.get("device"), DEVICE):
            counts.copies_out += 1
            counts.waits += not kwargs.get("non_blocking", False)
            return torch.ones(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
        result = func(*args, **kwargs)
        if func is _aten.copy_.default and _on_device(args[0]) and not _on_device(args[1]):
            counts.copies_in += 1
            counts.waits += not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
        elif func is _aten._to_copy.default and _on_device(result) and not _on_device(args):
            counts.copies_in += 1
            counts.waits += not kwargs.get("non_blocking", False)
        elif _on_device(result) and not func.is_view and name not in _NO_LAUNCH:
            counts.launches[name] += 1
        return result


def _leaves(target: torch.device | str | None, device: torch.device) -> bool:
    return target is not None and torch.device(target).type != device.type


def _on_device(values: object) -> bool:
    return any(isinstance(leaf, Tensor) and leaf.device.type == DEVICE.type for leaf in tree_leaves(values))
