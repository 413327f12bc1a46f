"""How fast each instance prefills, as it said when it came up."""

from actorserve.core.messages import Peer, Speed
from actorserve.core.timing.profile import Curve


class InstanceSpeeds:
    """The first quantum of each instance, which is its shortest iteration, and its prefill time by tokens."""

    def __init__(self) -> None:
        self._speeds: dict[Peer, tuple[float, Curve]] = {}
        self._fastest: Peer | None = None  # the one with the shortest first quantum above 0

    def learn(self, peer: Peer, speed: Speed) -> None:
        """Replaces what the instance said before. Raises: ValueError for an invalid speed; then nothing changes."""
        known = speed.min_iteration_s, Curve(speed.prefill_tokens, speed.prefill_s)
        self.forget(peer)
        self._speeds[peer] = known
        if known[0] > 0.0 and (self._fastest is None or known[0] < self._speeds[self._fastest][0]):
            self._fastest = peer

    def forget(self, peer: Peer) -> None:
        if self._speeds.pop(peer, None) is not None and peer == self._fastest:
            quanta = ((quantum_s, other) for other, (quantum_s, _) in self._speeds.items() if quantum_s > 0.0)
            fastest = min(quanta, default=None)
            self._fastest = None if fastest is None else fastest[1]

    def num_quanta(self, num_tokens: int) -> float:
        """The prefill time of so many tokens on the fastest instance, in its first quanta; 0 if no speed is known.

        A waiting request joins a level of the cluster's queue by it.
        """
        if self._fastest is None:
            return 0.0
        quantum_s, prefill_s = self._speeds[self._fastest]
        return prefill_s(num_tokens) / quantum_s

    def min_iteration_s(self, peer: Peer) -> float:
        """Seconds of this instance's shortest iteration; 0 if its speed is not known."""
        known = self._speeds.get(peer)
        return 0.0 if known is None else known[0]

    def prefill_s(self, peer: Peer, num_tokens: int) -> float:
        """Seconds in which this instance computes a prompt of so many tokens; 0 if its speed is not known."""
        known = self._speeds.get(peer)
        return 0.0 if known is None or num_tokens <= 0 else known[1](num_tokens)
