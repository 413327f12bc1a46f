"""What both formats say of rotary embedding."""

from typing import NamedTuple


class Rope(NamedTuple):
    """What DecoderConfig calls ``rope_theta``, ``rope_scaling`` and ``rotary_dim``."""

    theta: float
    scaling: dict[str, object] | None
    rotary_dim: int
