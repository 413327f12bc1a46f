"""A profile with round numbers, for times that are easy to compute by hand."""

from actorserve.core.timing.profile import Curve, Link, Profile

PROFILE = Profile(
    name="sums",
    model="tiny",
    hardware="paper",
    prefill=Curve((1.0, 11.0), (1.0, 2.0)),
    prefill_context_s=0.0,
    decode=Curve((1.0,), (0.5,)),
    decode_context=Curve((0.0,), (0.0,)),
    swap=Link(0.25, 1e4),
    transfer=Link(0.25, 1e4),
    kv_bytes_per_token=1000,
    dtype="float32",
)
"""A prompt of 11 tokens takes 2 s, an iteration of decodes 0.5 s; a block of 4 tokens is copied in 0.65 s."""
