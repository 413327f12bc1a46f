"""How the vocabulary's values are declared."""

from dataclasses import dataclass
from typing import TypeVar, dataclass_transform

_T = TypeVar("_T")


@dataclass_transform(frozen_default=True)
def value(cls: type[_T]) -> type[_T]:
    """A dataclass whose fields never change. mypy enforces that, and nothing does while the program runs.

    Python makes a dataclass that is frozen at run time three times as slowly, and a server makes many for each token.
    """
    return dataclass(slots=True, unsafe_hash=True)(cls)
