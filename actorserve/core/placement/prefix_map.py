"""Which instances hold the KV of which prompt prefixes, as the coordinator infers from its own placements.

A prefix has a name: a hash of its tokens and of the tenant's ``cache_salt``, so that tenants with different salts share
nothing here either. A gateway names only prefixes of the lengths in ``PREFIX_TOKENS``. Therefore the message stays
short however long the prompt is, and the coordinator never sees a token.

Instances do not report what they evict. So the map is a guess, and a wrong guess costs a little speed: for each
instance it remembers as many tokens as the pool holds, those placed there last.
"""

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b
from typing import Final

from actorserve.core.messages import Peer, RequestSpec

_STEP: Final = 64
_NAME_BYTES: Final = 8  # a collision, by chance or on purpose, only sends a request to an instance that is no better

PREFIX_TOKENS: Final = (*(n * _STEP for n in range(1, 9)), *(n * _STEP << k for k in range(1, 7) for n in range(5, 9)))
"""The lengths that have names: in steps of 64 up to 512, then four for each doubling up to 32,768; 32 in all."""

_HEX_DIGITS: Final = frozenset("0123456789abcdef")

MAX_HOLDERS: Final = 16
"""At most this many instances are remembered for one name. If more hold the prefix, forgetting some costs little."""


def prefix_names(spec: RequestSpec) -> tuple[str, ...]:
    """The names of a prompt's prefixes; number ``i`` stands for its first ``PREFIX_TOKENS[i]`` tokens.

    No name includes the prompt's last token, because that is computed in any case.
    """
    salt = blake2b(spec.cache_salt.encode(), digest_size=32, person=b"prefix_salt").digest()
    state = blake2b(salt, digest_size=_NAME_BYTES, person=b"prefix_name")
    names: list[str] = []
    first = 0
    for num_tokens in PREFIX_TOKENS:
        if num_tokens >= len(spec.prompt_token_ids):
            break
        state.update(array("q", spec.prompt_token_ids[first:num_tokens]).tobytes())
        names.append(state.hexdigest())
        first = num_tokens
    return tuple(names)


def _is_name(text: str) -> bool:
    return len(text) == 2 * _NAME_BYTES and _HEX_DIGITS.issuperset(text)


class PrefixMap:
    """The names that each instance is thought to hold. A request without names costs nothing."""

    def __init__(self) -> None:
        self._holders: dict[str, OrderedDict[Peer, None]] = {}  # by name, the most recent holder last
        self._names: dict[Peer, OrderedDict[str, int]] = {}  # by instance, with their lengths, the oldest first
        self._num_tokens: dict[Peer, int] = {}

    def learn(self, peer: Peer, names: Sequence[str], capacity_tokens: int) -> None:
        """A request with these names goes to ``peer``, whose pool holds ``capacity_tokens``.

        Ignores texts that ``prefix_names`` cannot produce, and more names than there are lengths, so that a faulty
        gateway cannot fill the memory.
        """
        if not names:
            return
        held = self._names.setdefault(peer, OrderedDict())
        num_tokens = self._num_tokens.get(peer, 0)
        # The longest first, so that tails are forgotten first, as in the instance's own cache.
        for index in reversed(range(min(len(names), len(PREFIX_TOKENS)))):
            name = names[index]
            if name not in held:
                if not _is_name(name):
                    continue
                held[name] = PREFIX_TOKENS[index] - (PREFIX_TOKENS[index - 1] if index else 0)
                num_tokens += held[name]
            held.move_to_end(name)
            holders = self._holders.setdefault(name, OrderedDict())
            holders[peer] = None
            holders.move_to_end(peer)
            if len(holders) > MAX_HOLDERS:
                oldest, _ = holders.popitem(last=False)
                self._num_tokens[oldest] -= self._names[oldest].pop(name)
        while num_tokens > capacity_tokens:
            name, length = held.popitem(last=False)
            num_tokens -= length
            self._drop_holder(name, peer)
        self._num_tokens[peer] = num_tokens

    def forget(self, peer: Peer) -> None:
        """Forget an instance that is gone."""
        for name in self._names.pop(peer, ()):
            self._drop_holder(name, peer)
        self._num_tokens.pop(peer, None)

    def holders(self, names: Sequence[str]) -> dict[Peer, int]:
        """The instances that hold a prefix of the prompt with these names, and its length in tokens, longest first.

        At most ``MAX_HOLDERS`` instances are returned.
        """
        found: dict[Peer, int] = {}
        for index in reversed(range(min(len(names), len(PREFIX_TOKENS)))):
            for peer in reversed(self._holders.get(names[index], ())):
                if len(found) == MAX_HOLDERS:
                    return found
                found.setdefault(peer, PREFIX_TOKENS[index])
        return found

    @property
    def num_names(self) -> int:
        """How many names are remembered, over all instances."""
        return sum(map(len, self._names.values()))

    def num_tokens(self, peer: Peer) -> int:
        """How many tokens of prefixes the instance is thought to hold."""
        return self._num_tokens.get(peer, 0)

    def _drop_holder(self, name: str, peer: Peer) -> None:
        holders = self._holders[name]
        del holders[peer]
        if not holders:
            del self._holders[name]
