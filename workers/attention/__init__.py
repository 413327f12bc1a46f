"""Attention backends behind one protocol."""

from workers.attention.base import Attention

__all__ = ["Attention"]
