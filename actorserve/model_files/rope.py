"""The parameters of rotary embedding, from either format."""

from typing import NamedTuple


class Rope(NamedTuple):
    """The ``rope_theta``, ``rope_scaling`` and ``rotary_dim`` of a DecoderConfig."""

    theta: float
    scaling: dict[str, object] | None
    rotary_dim: int
