"""Dispatch: which instance a request goes to (Llumnix, section 4.4.3: the one with the highest freeness).

Only an instance that admits the request is considered: it is healthy, its room suffices, and it is not reserved for
another request. If no instance admits the request, it waits in the cluster. Without late binding, as in the paper, it
waits at the freest instance instead. The paper does not look for room first. But freeness is per request of the batch,
so an instance with few large requests may be the freest one and yet lack the memory for a long prompt.

An instance that holds a prefix of the prompt (``core.placement.prefix_map``) counts as freer by the KV that this
saves. The paper has no prefix cache.
"""

from bisect import bisect_right
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple, Protocol

from actorserve.core.messages import InstanceRole, Peer, Place
from actorserve.core.placement.index import InstanceIndex, KindIndex
from actorserve.core.placement.instance_view import InstanceView
from actorserve.core.placement.prefix_map import PrefixMap
from actorserve.core.rng import hash64


class Need(NamedTuple):
    """What a request needs of its instance, apart from room: its ``kind`` ("" for any), and not to be ``avoid``."""

    kind: str
    avoid: Peer | None


class Reach(NamedTuple):
    """Which instances a request may get now: those of its kind (None: of any), but not the one to ``avoid``; and token
    instances as well if no prompt instance could hold it. Where a request finds no instance, a longer one with the same
    reach finds none either.
    """

    kind: str | None
    avoid: Peer | None
    with_token_instances: bool


class DispatchRule(Protocol):
    """How instances are compared: a request goes to the instance with the highest score of those that admit it."""

    @property
    def counts_prefixes(self) -> bool:
        """Whether ``num_saved_tokens`` changes the score."""
        ...

    @property
    def prefers_room(self) -> bool:
        """Without late binding: whether an instance without room for a request now gets it only if none has room."""
        ...

    def score(self, view: InstanceView, num_saved_tokens: int = 0) -> float:
        """The instance's score for a request whose first ``num_saved_tokens`` tokens have their KV there already."""
        ...


class HighestFreeness:
    """Llumnix's own rule, with all waiting requests counted (``InstanceView.dispatch_freeness``)."""

    counts_prefixes = True
    prefers_room = True

    def score(self, view: InstanceView, num_saved_tokens: int = 0) -> float:
        return view.dispatch_freeness(num_saved_tokens)


def dispatch(
    place: Place,
    index: InstanceIndex,
    rule: DispatchRule,
    prefixes: PrefixMap | None,
    seed: int | None = None,
    pool: InstanceRole = InstanceRole.MIXED,
) -> InstanceView | None:
    """The instance of ``pool`` with the highest score of those that admit the request now; None if no instance does.

    Ties go to the greater name. ``prefixes`` is None if prompt prefixes do not count. Then the answer is the first
    instance in the index that admits the request. Otherwise that instance is compared with the few instances that hold
    a prefix of the prompt; their scores include the tokens that this saves.

    Dispatchers that do not know of each other would all choose the same best instance. With a ``seed`` of its own, each
    draws two of the instances that admit the request, and compares these (Mitzenmacher, "The power of two choices in
    randomized load balancing", 2001).
    """
    kind = required_kind(place, index)
    best = best_admitting(place, kind, index, seed, pool)
    if best is None or prefixes is None or not place.prefix_names:
        return best
    best_key = best.score, best.peer
    for peer, num_saved_tokens in prefixes.holders(place.prefix_names).items():
        view = index.views[peer]
        if view.pool is pool and _admits(view, place, kind):
            best_key = max(best_key, (rule.score(view, min(num_saved_tokens, place.num_tokens)), peer))
    return index.views[best_key[1]]


def instance_to_wait_at(place: Place, index: InstanceIndex, pool: InstanceRole) -> InstanceView | None:
    """The instance of ``pool`` with the highest score of those that can hold the request once they have room; None
    without any.
    """
    bests = [
        next((view for view in found.highest_score_first() if view.is_healthy and view.can_hold(place)), None)
        for found in index.of_kind(required_kind(place, index), pool)
    ]
    return max(filter(None, bests), key=lambda view: (view.score, view.peer), default=None)


def required_kind(place: Place, index: InstanceIndex) -> str | None:
    """The only kind of instance that the request may go to; None if it may go to any.

    A request keeps to the kind that made its tokens so far, so that its answer stays the same. It does so as long as
    some instance of that kind could hold it.
    """
    if place.kind and place.num_tokens <= index.max_capacity_tokens(place.kind, place.avoid):
        return place.kind
    return None


def reach_of(place: Place, index: InstanceIndex) -> Reach:
    kind = required_kind(place, index)
    return Reach(kind, place.avoid, place.num_tokens > index.max_prompt_tokens(kind, place.avoid))


def groups_for(place: Place, index: InstanceIndex) -> Collection[KindIndex]:
    """The groups of instances that the request waits for."""
    reach = reach_of(place, index)
    return index.of_kind(reach.kind) if reach.with_token_instances else index.that_start(reach.kind)


def admits_any(need: Need, sizes: Sequence[int], index: InstanceIndex, *, drafts: bool = False) -> bool:
    """Whether an instance has room for one of these requests, which have this need and are ``sizes`` tokens long.

    ``sizes`` rise. An instance that is reserved counts as soon as it has the room that is reserved. ``drafts``: as for
    ``Fleet.admits_any``.
    """
    num_bound = bisect_right(sizes, index.max_capacity_tokens(need.kind, need.avoid)) if need.kind else 0
    for kind, begin, end in ((need.kind, 0, num_bound), (None, num_bound, len(sizes))):
        if begin == end:
            continue
        # From here on requests may get token instances, too: they are too long for all prompt instances.
        long = begin if drafts else bisect_right(sizes, index.max_prompt_tokens(kind, need.avoid), begin, end)
        if begin < long and sizes[begin] <= index.max_started_tokens(kind, need.avoid):
            return True
        if long < end and sizes[long] <= index.max_admitted_tokens(kind, need.avoid):
            return True
    return False


def best_admitting(
    place: Place, kind: str | None, index: InstanceIndex, seed: int | None, pool: InstanceRole
) -> InstanceView | None:
    """The instance of ``pool`` and ``kind`` (None: of any) with the highest score of those that admit the request, or
    of two of these if there is a ``seed``; None if no instance does.
    """
    if seed is not None:
        return _best_of_two(place, kind, index, seed, pool)
    best = None
    for found in index.of_kind(kind, pool):
        if place.num_tokens <= found.max_admitted_tokens(place.avoid):
            views = found.best_first(place.num_tokens)
            view = next((view for view in views if _admits(view, place, kind)), None)
            if view is not None and (best is None or (view.score, view.peer) > (best.score, best.peer)):
                best = view
    return best


def _best_of_two(
    place: Place, kind: str | None, index: InstanceIndex, seed: int, pool: InstanceRole
) -> InstanceView | None:
    groups = index.of_kind(kind, pool)
    num_views = sum([found.num_admitting(place.num_tokens) for found in groups])
    if not num_views:
        return None
    first = hash64(seed, 0) % num_views
    drawn = [first]
    if num_views > 1:
        second = hash64(seed, 1) % (num_views - 1)
        drawn.append(second + 1 if second >= first else second)
    views = [view for view in (_drawn_from(groups, place.num_tokens, at) for at in drawn) if _admits(view, place, kind)]
    if not views:  # both are reserved, or one is to be avoided
        return best_admitting(place, kind, index, None, pool)
    return max(views, key=lambda view: view.score)  # the first that was drawn, if they are equal


def _drawn_from(groups: Iterable[KindIndex], num_tokens: int, at: int) -> InstanceView:
    """The instance at this place, counted from 0, of all in these groups that have room for ``num_tokens``."""
    for found in groups:
        num_views = found.num_admitting(num_tokens)
        if at < num_views:
            return found.by_room(at)
        at -= num_views
    raise IndexError(f"{at} more instances have no room")


def _admits(view: InstanceView, place: Place, kind: str | None) -> bool:
    has_room = place.num_tokens <= view.admitted_tokens
    is_open = view.reserved_for is None or view.reserved_for.request_id == place.request_id
    return has_room and is_open and view.peer != place.avoid and (kind is None or view.kind == kind)
