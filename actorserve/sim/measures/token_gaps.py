"""The time between two tokens of a request (TBT)."""

from collections.abc import Hashable, Sequence

from actorserve.sim.measures.distribution import Distribution


class _Newest:
    """An instance's newest iteration that made tokens: its end, and the requests that got one, less those that got one
    on another instance afterwards.
    """

    __slots__ = ("end_s", "request_ids")

    def __init__(self) -> None:
        self.end_s = 0.0
        self.request_ids: tuple[str, ...] = ()


class TokenGaps:
    """The distribution of the gaps between the tokens of all requests, as Splitwise and Sarathi-Serve mean TBT: each
    gap counts once, so that a long answer counts more than a short one. (TPOT has one mean gap for each request.)

    A gap is the time between the ends of the iterations that made the two tokens, on one instance or on two. It
    includes preemptions, migrations and failovers. A run of iterations with the same requests costs time for each
    iteration, and not for each token.
    """

    def __init__(self) -> None:
        self.gaps = Distribution()
        self._newest: dict[Hashable, _Newest] = {}  # by instance
        # Where each open request got its newest token: in the newest iteration of an instance, or earlier, at a time.
        self._tokens: dict[str, _Newest | float] = {}

    @property
    def num_followed(self) -> int:
        """Requests whose next token would end a gap."""
        return len(self._tokens)

    def on_iterations(self, instance: Hashable, request_ids: tuple[str, ...], ends: Sequence[float]) -> None:
        """Iterations of an instance ended at these times. Each made one token for each of these requests."""
        if not request_ids:
            return
        newest = self._newest.get(instance)
        if newest is None:
            newest = self._newest[instance] = _Newest()
        num_same = len(request_ids)
        if request_ids != newest.request_ids:
            num_same = self._replace(newest, request_ids, ends[0])
        before_s = newest.end_s
        for end_s in ends:
            if num_same:
                self.gaps.add(end_s - before_s, num_same)
            num_same = len(request_ids)
            before_s = end_s
        newest.end_s = before_s

    def on_end(self, request_id: str) -> None:
        """The request gets no more tokens."""
        self._tokens.pop(request_id, None)

    def on_lost(self, instance: Hashable) -> None:
        """The instance is gone, and its requests may go on elsewhere."""
        self._newest.pop(instance, None)

    def _replace(self, newest: _Newest, request_ids: tuple[str, ...], end_s: float) -> int:
        """Other requests get tokens than before. Adds the gaps of those that join, and returns how many stay."""
        tokens = self._tokens
        num_same = 0
        for request_id in request_ids:
            place = tokens.get(request_id)
            if place is newest:
                num_same += 1
                continue
            if isinstance(place, _Newest):
                self.gaps.add(end_s - place.end_s)
                place.request_ids = tuple(other for other in place.request_ids if other != request_id)
            elif place is not None:
                self.gaps.add(end_s - place)
            tokens[request_id] = newest
        staying = set(request_ids)
        for request_id in newest.request_ids:
            if request_id not in staying and tokens.get(request_id) is newest:
                tokens[request_id] = newest.end_s
        newest.request_ids = request_ids
        return num_same
