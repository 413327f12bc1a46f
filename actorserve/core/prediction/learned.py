"""Lengths of outputs, learned from the requests of the same classes that ended.

A request belongs to several classes, each within the next: its client's prompts that begin with the same tokens, many
or few, because system prompts and templates repeat; all of its client's; and all. An instance serves one model, so the
model makes no class. Of each class the latest lengths are kept, and the mean of those above what a request has
generated tells what is left of it. A class with few such lengths counts for little, and the next wider one for the
rest.
"""

from array import array
from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b

from actorserve.core.request import Request

MAX_CLASSES = 4096
"""Beyond this number the class that has not been used for longest is forgotten."""

_NUM_BLOCKS = (1, 4, 16)  # of a prompt's beginning, by which classes are told apart
_TOKENS_PER_BLOCK = 16
_NUM_KEPT = 256  # lengths of a class
_NUM_ENOUGH = 16  # lengths, so that wider classes do not count
_WEIGHT = 2.0  # of the wider classes, in lengths
_NAME_BYTES = 16


class _Lengths:
    """The latest lengths of one class."""

    __slots__ = ("_latest", "_oldest", "_sorted")

    def __init__(self) -> None:
        self._latest = array("i")
        self._oldest = 0  # the place of the length that is replaced next
        self._sorted = array("i")

    def add(self, length: int) -> None:
        lengths, latest = self._sorted, self._latest
        if len(latest) < _NUM_KEPT:
            latest.append(length)
        else:
            del lengths[bisect_left(lengths, latest[self._oldest])]
            latest[self._oldest] = length
            self._oldest = (self._oldest + 1) % _NUM_KEPT
        insort(lengths, length)

    def above(self, num_output: int) -> tuple[int, int]:
        """How many lengths are above ``num_output``, and by how much together."""
        longer = self._sorted[bisect_right(self._sorted, num_output) :]
        return len(longer), sum(longer) - len(longer) * num_output


class LearnedLengths:
    """The lengths of outputs, by class."""

    def __init__(self, max_classes: int = MAX_CLASSES) -> None:
        self._max_classes = max_classes
        self._all = _Lengths()
        self._classes: OrderedDict[bytes, _Lengths] = OrderedDict()  # by name, the latest used last

    def __len__(self) -> int:
        """How many classes it knows."""
        return len(self._classes)

    def forecast(self, request: Request) -> "LearnedForecast":
        return LearnedForecast(self, _class_names(request))

    def rest(self, names: Sequence[bytes], num_output: int) -> float | None:
        """What is left after ``num_output`` tokens, in the classes ``names``, the narrowest first. None if no known
        output was longer.
        """
        total, weight = 0.0, 1.0  # the mean so far, and how much wider classes count
        for name in names:
            lengths = self._classes.get(name)
            if lengths is None:
                continue
            number, rest = lengths.above(num_output)
            if number >= _NUM_ENOUGH:
                return total + weight * rest / number
            total += weight * rest / (number + _WEIGHT)
            weight *= _WEIGHT / (number + _WEIGHT)
        number, rest = self._all.above(num_output)
        if number:
            return total + weight * rest / number
        return total / (1.0 - weight) if weight < 1.0 else None

    def learn(self, names: Sequence[bytes], length: int) -> None:
        """A request of these classes has ended."""
        classes = self._classes
        for name in names:
            lengths = classes.get(name)
            if lengths is None:
                lengths = classes[name] = _Lengths()
            else:
                classes.move_to_end(name)
            lengths.add(length)
        while len(classes) > self._max_classes:
            classes.popitem(last=False)
        self._all.add(length)


class LearnedForecast:
    """The forecast of one request."""

    __slots__ = ("_learned", "_names")

    def __init__(self, learned: LearnedLengths, names: Sequence[bytes]) -> None:
        self._learned = learned
        self._names = names

    def rest(self, num_output: int) -> float | None:
        return self._learned.rest(self._names, num_output)

    def ended(self, num_output: int) -> None:
        self._learned.learn(self._names, num_output)


def _class_names(request: Request) -> Sequence[bytes]:
    """The names of its classes, the narrowest first."""
    # The names of keys and salts are hashed first, so that none can be chosen that equals another one and tokens.
    tenant = repr((request.spec.client, request.cache_salt)).encode()
    hashed = blake2b(key=blake2b(tenant).digest(), digest_size=_NAME_BYTES, person=b"length classes")
    names = [hashed.digest()]
    first = 0
    for num_blocks in _NUM_BLOCKS:
        end = num_blocks * _TOKENS_PER_BLOCK
        if end > request.num_prompt:
            break
        hashed.update(request.token_ids[first:end].tobytes())
        names.append(hashed.digest())
        first = end
    names.reverse()
    return names
