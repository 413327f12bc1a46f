"""A profile with round numbers, for tests of what is computed from it."""

from actorserve.core.timing.profile import Curve, Link, Profile

PROFILE = Profile(
    name="a GPU's shape",
    model="none",
    hardware="none",
    prefill=Curve((1, 100, 1100), (0.01, 0.01, 0.11)),  # bound by reading weights up to 100 tokens
    prefill_context_s=1e-8,
    decode=Curve((1, 101), (0.01, 0.02)),
    decode_context=Curve((0, 1000), (0.0, 0.001)),
    swap=Link(0.001, 1e6),
    transfer=Link(0.0, 1e6),
    kv_bytes_per_token=100,
    dtype="float32",
)
