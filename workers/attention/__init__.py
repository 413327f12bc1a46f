"""Attention backends behind one protocol."""

from workers.attention.base import Attention
from workers.attention.choose import choose_attention

__all__ = ["Attention", "choose_attention"]
