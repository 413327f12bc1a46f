"""Limits on the requests that are open at once under one API key, over all gateways of the host."""

from actorserve.http.host_counts import HostCounts


class OpenRequests:
    """Counts each key's open requests in ``counts``, which must begin at 0 in a new process: a dead gateway's requests
    are not open.
    """

    def __init__(self, counts: HostCounts) -> None:
        self._counts = counts

    def begin(self, key: str, most: int) -> bool:
        """Count one more request, unless the key has ``most`` open on this host. Returns whether it was counted.

        It counts the request before it looks at the other gateways' numbers, so that no lock is needed, which a stopped
        gateway could hold. If two gateways begin a key's last request at the same time, both may refuse.
        """
        name = (key,)
        cell = self._counts.cell(name)
        self._counts.values[cell] += 1.0
        if self._counts.total(name) <= most:
            return True
        self._counts.values[cell] -= 1.0
        return False

    def end(self, key: str) -> None:
        """A request that ``begin`` counted has ended."""
        self._counts.values[self._counts.cell((key,))] -= 1.0
