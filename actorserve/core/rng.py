"""Randomness as a pure function of its coordinates: no state, no order, the same on every machine.

A counter-based generator (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011): the number for
``(seed, position)`` is computed from that pair alone, so a token's choice cannot depend on the batch, the worker, or
earlier choices. The mixing function is SplitMix64's finalizer (Steele, Lea, Flood, "Fast splittable pseudorandom number
generators", OOPSLA 2014). All arithmetic is on integers modulo 2**64.
"""

_MASK = 2**64 - 1
_GAMMA = 0x9E3779B97F4A7C15  # SplitMix64's increment: the odd integer nearest 2**64 / golden ratio
_CHOICE_DOMAIN = 0xD1B54A32D192ED03  # keeps the seeds of choices apart from the stream of uniforms


def hash64(seed: int, counter: int) -> int:
    """Output number ``counter`` of the SplitMix64 stream that starts at the mixed ``seed``; both modulo 2**64.

    Mixing the seed first puts the streams of neighbouring seeds at unrelated points of the generator's cycle.
    """
    return _mix(_mix(seed + _GAMMA) + (counter + 1) * _GAMMA)


def uniform(seed: int, position: int) -> float:
    """The number in [0, 1) with which output position ``position`` of a request with ``seed`` is chosen.

    It is a multiple of 2**-53, and so exact in a float64. Negative seeds are taken modulo 2**64.
    """
    return (hash64(seed, position) >> 11) * 2.0**-53


def derive_seed(seed: int, choice_index: int) -> int:
    """The seed of choice ``choice_index`` of a request for several choices (OpenAI's ``n``).

    Choice 0 keeps ``seed``, so that it equals the only choice of the same request. Other choices get a number of 63
    bits, because every integer column on the wire holds that.

    Raises: ValueError for a negative index.
    """
    if choice_index < 0:
        raise ValueError(f"choice index {choice_index} is negative")
    if choice_index == 0:
        return seed
    return hash64(seed ^ _CHOICE_DOMAIN, choice_index) >> 1


def _mix(value: int) -> int:
    """SplitMix64's finalizer: a bijection of 64-bit integers in which every input bit moves every output bit."""
    value &= _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
