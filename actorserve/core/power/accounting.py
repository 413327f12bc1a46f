"""The energy of requests: how what an instance's device takes is shared among the requests that it computes.

The rule:

- The device's energy in a period, from one reading of its power to the next, is the difference of its energy counter.
  Without a counter it is the mean of both readings' power, times the period. Of a device that several processes compute
  on, it is the part that a reading counts for this one (``PowerReading``).
- The part of the period in which no iteration ran is idle time. Its part of the energy belongs to no request. (On CPUs
  the reading is what the worker's own CPU time took, which has no idle time: a period's energy is that of its
  iterations, if it had any.)
- The iterations get the other part by their durations: an iteration that a reading divides has one part of its energy
  from each period. (So an iteration's energy is the device's mean power while it computes, times its duration.)
- An iteration's rows share its duration by what they cost by the profile: a prefill's chunk as much as an iteration of
  that chunk alone; a decode an equal part of an iteration of all its decodes without context, and a part of what their
  contexts cost in proportion to its own context.
- A row that feeds tokens of the prompt belongs to the phase *prompt*, and one that feeds later tokens to *token*. What
  is computed again after a preemption, or at another instance, is energy as well.
- A request that ends cannot wait for the next reading. What it computed since the last one counts at the mean power
  of the iterations before that reading. The difference, known later, belongs to no request. So the energies of requests
  and the rest sum to the device's energy, at every reading.
- Where the power is not known, a request's energy is not known: no number is made up.

Readings are periodic and not once per iteration, because a driver may take a millisecond to answer, and counters change
about ten times a second. So a reading could not tell short iterations apart, and the engine would wait for it.
"""

from collections.abc import Hashable, Iterable
from typing import Final

from actorserve.core.messages import NOTHING_SPENT, Energy, PowerReading

_STALE_S: Final = 5.0  # without a reading for so long, the power is not known

EnergyRow = tuple[Hashable | None, bool, float]
"""A row of an iteration: its request (None: it is gone), whether it belongs to the phase *token*, and its cost by the
profile, in any unit.
"""


class _Spent:
    """What one request has got: joules, and seconds of iterations since the last reading, by phase."""

    __slots__ = ("is_known", "prompt_j", "prompt_s", "token_j", "token_s")

    def __init__(self, *, is_known: bool) -> None:
        self.is_known = is_known
        self.prompt_j = 0.0
        self.token_j = 0.0
        self.prompt_s = 0.0
        self.token_s = 0.0


class EnergyAccount:
    """The energy of one instance's requests. It counts from the first reading on.

    ``prompt_j`` and ``token_j`` were spent on requests, and ``rest_j`` on none of them. ``pending_j`` belongs to
    iterations whose rows have not got it yet.
    """

    def __init__(self) -> None:
        self.is_open = False  # whether there was a reading
        self.prompt_j = 0.0
        self.token_j = 0.0
        self.rest_j = 0.0
        self.pending_j = 0.0
        self._spent: dict[Hashable, _Spent] = {}
        self._last = PowerReading()
        self._read_s = 0.0
        self._now = 0.0
        self._begun_s: float | None = None  # when the iteration that runs now began
        self._busy_s = 0.0  # in iterations, since the last reading
        self._done_s = 0.0  # of the iterations whose rows have seconds, but no joules yet
        self._gone_s = 0.0  # the part of that of requests that are gone
        self._advance_j = 0.0  # what those requests got for it
        self._watts: float | None = None  # the mean power of the last iterations

    def begin(self, now: float) -> None:
        """An iteration begins, after the last one has ended."""
        self._begun_s = self._now = now

    def end(self, rows: Iterable[EnergyRow], now: float) -> None:
        """The iteration that runs has ended. ``rows`` are iterated only once there was a reading."""
        begun_s, self._begun_s, self._now = self._begun_s, None, now
        if not self.is_open or begun_s is None:
            return
        self._busy_s += now - max(begun_s, self._read_s)
        self._done_s += now - begun_s
        costs = list(rows)
        total = sum([cost for _, _, cost in costs])
        if total <= 0.0:
            self._gone_s += now - begun_s
            return
        duration_s = now - begun_s
        spent_by = self._spent
        for request, is_token, cost in costs:
            if request is None:
                self._gone_s += duration_s * (cost / total)
                continue
            spent = spent_by.get(request)
            if spent is None:
                spent = spent_by[request] = _Spent(is_known=True)
            if is_token:
                spent.token_s += duration_s * (cost / total)
            else:
                spent.prompt_s += duration_s * (cost / total)

    def read(self, reading: PowerReading, now: float, begun: Iterable[Hashable]) -> None:
        """The power was read. ``begun`` are the requests here that had a part in an iteration. It is iterated if the
        power was not known before, because then their energy is not known.
        """
        if reading.energy_j is None and reading.draw_watts is None:
            return
        energy_j = self._energy_since(reading, now) if self.is_open else None
        self._last, self._now = reading, now
        if energy_j is None:
            self._open(now, begun)
        else:
            self._share(energy_j, now)

    def spent(self, request: Hashable) -> Energy | None:
        """What was spent on the request so far; None if that is not known."""
        if not self.is_open:
            return None
        spent = self._spent.get(request)
        if spent is None:
            return NOTHING_SPENT
        if not spent.is_known:
            return None
        if spent.prompt_s + spent.token_s <= 0.0:
            return Energy(spent.prompt_j, spent.token_j)
        if self._watts is None or self._now > self._read_s + _STALE_S:
            return None
        return Energy(spent.prompt_j + spent.prompt_s * self._watts, spent.token_j + spent.token_s * self._watts)

    def forget(self, request: Hashable) -> Energy | None:
        """The same, and the request is gone from now on. Joules that it got at readings stay in the sums, even if the
        whole is not known.
        """
        energy = self.spent(request)
        spent = self._spent.pop(request, None)
        if spent is not None:
            self._gone_s += spent.prompt_s + spent.token_s
            if energy is not None:
                prompt_j, token_j = energy.prompt_j - spent.prompt_j, energy.token_j - spent.token_j
                self.prompt_j += prompt_j
                self.token_j += token_j
                self._advance_j += prompt_j + token_j
        return energy

    def _energy_since(self, reading: PowerReading, now: float) -> float | None:
        """The device's energy since the last reading; None if that is not known."""
        last = self._last
        if reading.energy_j is not None and last.energy_j is not None:
            return max(0.0, reading.energy_j - last.energy_j)
        if reading.draw_watts is None or last.draw_watts is None or now > self._read_s + _STALE_S:
            return None
        return (reading.draw_watts + last.draw_watts) / 2.0 * (now - self._read_s)

    def _open(self, now: float, begun: Iterable[Hashable]) -> None:
        """Count from now on. What was spent before is not known."""
        self.is_open = True
        for request in begun:
            self._spent[request] = _Spent(is_known=False)
        for spent in self._spent.values():
            spent.is_known = False
            spent.prompt_s = spent.token_s = 0.0
        # What requests got in advance was part of energy that is not known.
        self.rest_j -= self._advance_j
        self.rest_j += self.pending_j
        self.pending_j = self._done_s = self._gone_s = self._advance_j = self._busy_s = 0.0
        self._watts = None
        self._read_s = now
        if self._begun_s is not None:
            self._begun_s = now

    def _share(self, energy_j: float, now: float) -> None:
        """The device took so much since the last reading."""
        period_s = now - self._read_s
        busy_s = self._busy_s
        running_s = 0.0
        if self._begun_s is not None:
            busy_s += now - max(self._begun_s, self._read_s)
            running_s = now - self._begun_s
        busy = min(1.0, busy_s / period_s) if period_s > 0.0 else 0.0
        if busy > 0.0 and not self._last.device:
            busy = 1.0
        busy_j = energy_j * busy
        self.rest_j += energy_j - busy_j
        self.pending_j += busy_j
        self._read_s, self._busy_s = now, 0.0
        if self._done_s + running_s <= 0.0:
            return
        watts = self._watts = self.pending_j / (self._done_s + running_s)
        self.pending_j = max(0.0, self.pending_j - watts * self._done_s)
        for spent in self._spent.values():
            prompt_j, token_j = watts * spent.prompt_s, watts * spent.token_s
            spent.prompt_s = spent.token_s = 0.0
            spent.prompt_j += prompt_j
            spent.token_j += token_j
            self.prompt_j += prompt_j
            self.token_j += token_j
        self.rest_j += watts * self._gone_s - self._advance_j
        self._done_s = self._gone_s = self._advance_j = 0.0
