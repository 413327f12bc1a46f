"""Dispatch: which instance a request goes to (Llumnix, section 4.4.3: the one with the highest freeness).

Only an instance that admits the request is considered: it is healthy, its room suffices, and it is not reserved for
another request. If no instance admits the request, it waits in the cluster.

An instance that holds the beginning of the prompt (``core.placement.prefix_map``) counts as freer by the KV that this
saves. The paper has no prefix cache.
"""

from typing import Protocol

from actorserve.core.messages import Place
from actorserve.core.placement.index import InstanceIndex
from actorserve.core.placement.instance_view import InstanceView
from actorserve.core.placement.prefix_map import PrefixMap


class DispatchRule(Protocol):
    """What instances are compared by: of those that admit a request, it goes to the one with the highest score."""

    @property
    def counts_prefixes(self) -> bool:
        """Whether ``num_saved_tokens`` changes the score."""
        ...

    def score(self, view: InstanceView, num_saved_tokens: int = 0) -> float:
        """The instance's score for a request whose first ``num_saved_tokens`` tokens have their KV there already."""
        ...


class HighestFreeness:
    """Llumnix's own rule."""

    counts_prefixes = True

    def score(self, view: InstanceView, num_saved_tokens: int = 0) -> float:
        return view.freeness(num_saved_tokens)


def dispatch(place: Place, index: InstanceIndex, rule: DispatchRule, prefixes: PrefixMap | None) -> InstanceView | None:
    """The instance with the highest score of those that admit the request now; None if no instance does.

    Ties end on the greater name. ``prefixes`` is None if prompts' beginnings do not count. Then the answer is the first
    instance in the index that admits the request. Otherwise the few instances that hold the prompt's beginning are
    compared with it, each by the score that includes what it saves.
    """
    if place.num_tokens > index.max_admitted_tokens:
        return None
    kind = required_kind(place, index)
    views = index.best_first(place.num_tokens)
    best = next((view for view in views if _admits(view, place, kind)), None)
    if best is None or prefixes is None or not place.prefix_names:
        return best
    best_key = best.score, best.peer
    for peer, num_saved_tokens in prefixes.holders(place.prefix_names).items():
        view = index.views[peer]
        if _admits(view, place, kind):
            best_key = max(best_key, (rule.score(view, min(num_saved_tokens, place.num_tokens)), peer))
    return index.views[best_key[1]]


def required_kind(place: Place, index: InstanceIndex) -> str | None:
    """The only kind of instance that the request may go to; None if it may go to any.

    A request keeps to the kind that made its tokens so far, so that its answer stays the same. It does so as long as
    some instance of that kind could hold it.
    """
    if place.kind and any(view.kind == place.kind and view.can_hold(place) for view in index.views.values()):
        return place.kind
    return None


def _admits(view: InstanceView, place: Place, kind: str | None) -> bool:
    has_room = place.num_tokens <= view.admitted_tokens
    is_open = view.reserved_for is None or view.reserved_for.request_id == place.request_id
    return has_room and is_open and view.peer != place.avoid and (kind is None or view.kind == kind)
