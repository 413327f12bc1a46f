"""Counters of a gateway's sessions."""

from dataclasses import dataclass


@dataclass(slots=True)
class GatewayCounts:
    """Events since the gateway's start."""

    num_stale_messages: int = 0
    num_failovers: int = 0
    num_handed_over: int = 0
    num_placed_by_fallback: int = 0
    num_takeovers: int = 0
    """How often a coordinator served after another one, or after an earlier term of its own."""
