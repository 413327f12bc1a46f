"""Stands for modules that the tests import and that are not installed: vLLM's own, and torch.

Whatever is imported from such a module is an ``Absent``. It may be imported, passed on, subclassed and asked for its
truth (it is false) while tests are collected. A test that calls one needs vLLM's code and not only its server, so the
test is skipped.
"""

import importlib.abc
import importlib.machinery
import sys
from types import ModuleType
from typing import Any

import pytest


class Running:
    """Whether a test or its fixtures run."""

    is_test = False


class Absent:
    """Something of a module that is not installed."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> "Absent":
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent(f"{self._name}.{name}")

    def __call__(self, *_: object, **__: object) -> "Absent":
        if Running.is_test:
            pytest.skip(f"tests vLLM's code and not its server: {self._name}")
        return self

    def __getitem__(self, _: object) -> "Absent":
        return self

    def __or__(self, _: object) -> "Absent":
        return self

    def __add__(self, _: object) -> "Absent":
        return self

    def __bool__(self) -> bool:
        return False

    def __mro_entries__(self, _: object) -> tuple[type, ...]:
        return ()


class AbsentModule(ModuleType):
    """A module whose every name is an ``Absent``, except those that were set."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent(f"{self.__name__}.{name}")


class AbsentModules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds ``names`` and everything below them."""

    def __init__(self, *names: str) -> None:
        self._names = names

    def install(self) -> None:
        """Ask this finder first, because the tests' folder lies beside vLLM's own code."""
        sys.meta_path.insert(0, self)

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> Any:
        if any(fullname == name or fullname.startswith(f"{name}.") for name in self._names):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return AbsentModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """There is nothing to run."""
