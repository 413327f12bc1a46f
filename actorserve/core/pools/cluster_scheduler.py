"""Splitwise's cluster-level scheduler (section 4.2): a prompt instance and a token instance for each request.

There are three pools. A prompt instance computes prompts and hands the requests over; a token instance computes the
tokens after them; a mixed instance does both, and keeps its requests. A request arrives, and gets both instances at
once, so that the token instance has memory for it when its prompt is computed:

    prompt instance := the shortest queue of the prompt pool, in pending tokens
        if that queue is over the limit:    the mixed pool's best, if its queue is not
        if there is none:                   the least loaded token instance, which is drafted into the mixed pool
        or, with late binding:              none yet, while the cluster's own line is within the limit
    token instance := the best of the token pool
        if none has room:                   the mixed pool's best
        if there is none:                   the least loaded prompt instance, which is drafted into the mixed pool

A drafted instance goes back to its own pool when it has no foreign work left, and has got none for a while.

Deviations:
- What "best" means depends on the pool. Prompt instances have queues; what counts on the others is memory, so they
  compare by freeness (``core.placement.dispatch``), as Llumnix does. The paper counts pending tokens everywhere.
- A request whose prompt a mixed instance computes stays there, because a transfer would gain nothing. But a prompt
  instance that is drafted hands over what token instances have room for. Otherwise it would keep all requests that come
  to it, and never go back, although the token pool has long been empty.
- With late binding a prompt instance has a short queue, and the other requests wait in the cluster. So their tokens
  count, too: no instance is drafted while fewer wait than the limit allows for each prompt instance.
- A token instance has room as long as its memory is not full of what is there or is about to come. What waits for its
  prompt counts where instances are compared, but takes no room, because others leave until its KV comes. If the room
  is then lacking, the token instance declines, and the prompt instance goes on decoding.
- If no instance has room at all, the request waits in the cluster (``core.cluster.state``). If a token instance
  declines, the prompt instance goes on decoding, and the request moves when one has room (``core.migration.pairing``).
- The published simulator takes a queue for empty while its one prompt is computed, so that it drafts later.
- The published simulator lets a drafted instance go back only when it is empty, which may never happen.
"""

from dataclasses import dataclass

from actorserve.core.messages import InstanceRole, Peer, Place
from actorserve.core.placement.fleet import Fleet
from actorserve.core.placement.instance_view import InstanceView
from actorserve.core.pools.config import PoolsConfig


@dataclass(frozen=True, slots=True)
class Pair:
    """Where a request's prompt is computed, and where its tokens are. ``token`` is None if the first one does both."""

    prompt: InstanceView
    token: InstanceView | None


class ClusterScheduler:
    """Chooses pairs, and keeps the mixed pool. In a fleet without roles all instances are mixed."""

    def __init__(self, config: PoolsConfig, fleet: Fleet) -> None:
        self._config = config
        self._fleet = fleet
        self._drafted_s: dict[Peer, float] = {}
        """By drafted instance: when it was last chosen for the phase of the other pool."""

    def choose(
        self, place: Place, now: float, seed: int | None = None, num_waiting_tokens: int | None = None
    ) -> Pair | None:
        """The instances for a request; None if none has room for its prompt. Drafts an instance if need be.

        ``seed``: as for ``Fleet.choose``. ``num_waiting_tokens``: of the requests that wait in the cluster, in place of
        which a request may be drafted for; None if requests cannot wait there.
        """
        if not self._fleet.has_roles:
            view = self._fleet.choose(place, seed=seed)
            return None if view is None else Pair(view, None)
        prompt = self._prompt_instance(place, now, seed, num_waiting_tokens)
        if prompt is not None and prompt.is_drafted and prompt.role is InstanceRole.TOKEN:
            self._drafted_s[prompt.peer] = now
        return None if prompt is None else Pair(prompt, self._token_instance(place, prompt, now, seed))

    def _prompt_instance(
        self, place: Place, now: float, seed: int | None, num_waiting_tokens: int | None
    ) -> InstanceView | None:
        fleet = self._fleet
        own = self._best(place, seed, InstanceRole.PROMPT)
        if own is not None and self._is_short(own, place):
            return own
        mixed = self._best(place, seed, InstanceRole.MIXED)
        if mixed is not None and self._is_short(mixed, place):
            return mixed
        if own is None and num_waiting_tokens is not None and self._may_wait(place, num_waiting_tokens):
            return mixed
        drafted = fleet.choose(place, seed=seed, pool=InstanceRole.TOKEN)
        if drafted is not None:
            self._draft(drafted, now)
            return drafted
        return own or mixed

    def _best(self, place: Place, seed: int | None, pool: InstanceRole) -> InstanceView | None:
        """The best instance of the pool for the prompt. With a ``seed``, that is the better of two drawn ones, if its
        queue is short, because a long queue counts only if all are long.
        """
        drawn = self._fleet.choose(place, seed=seed, pool=pool)
        if seed is None or drawn is None or self._is_short(drawn, place):
            return drawn
        return self._fleet.choose(place, pool=pool)

    def _token_instance(self, place: Place, prompt: InstanceView, now: float, seed: int | None) -> InstanceView | None:
        """None if the prompt's instance is to decode as well."""
        if prompt.role is not InstanceRole.PROMPT:
            return None
        fleet, kind = self._fleet, None if self._config.across_kinds else prompt.kind
        own = fleet.choose_to_decode(place, kind, InstanceRole.TOKEN, seed)
        if own is not None:
            return own
        if prompt.is_drafted:
            self._drafted_s[prompt.peer] = now
            return None
        mixed = fleet.choose_to_decode(place, kind, InstanceRole.MIXED, seed)
        if mixed is not None:
            if mixed.is_drafted and mixed.role is InstanceRole.PROMPT:
                self._drafted_s[mixed.peer] = now
            return mixed
        drafted = fleet.choose_to_decode(place, kind, InstanceRole.PROMPT, seed)
        if drafted is None:
            return None
        self._draft(drafted, now)
        return None if drafted is prompt else drafted

    def _is_short(self, view: InstanceView, place: Place) -> bool:
        """Whether the prompt may join the queue. An empty queue takes a prompt of any length."""
        pending_tokens = view.pending_tokens
        return not pending_tokens or pending_tokens + place.num_tokens <= self._config.max_pending_tokens

    def _may_wait(self, place: Place, num_waiting_tokens: int) -> bool:
        """Whether the cluster's line is within the limit of the queues, together, of the prompt instances that could
        hold the request. Without such an instance, no prompt instance would ever take the request from the line.
        """
        num_prompts = self._fleet.num_awaited(place, InstanceRole.PROMPT)
        return num_prompts > 0 and num_waiting_tokens <= num_prompts * self._config.max_pending_tokens

    def drafts_for_all(self, num_waiting_tokens: int) -> bool:
        """Whether so long a line is over the limit for every request that waits, so that token instances help."""
        num_prompts = self._fleet.num_open(InstanceRole.PROMPT)
        return num_waiting_tokens > num_prompts * self._config.max_pending_tokens

    # --- the mixed pool ----------------------------------------------------------------------------------------------

    def _draft(self, view: InstanceView, now: float) -> None:
        self._drafted_s[view.peer] = now
        self._fleet.draft(view, is_drafted=True)

    def on_report(self, view: InstanceView, now: float) -> None:
        """A drafted instance whose foreign work is done goes back to its own pool."""
        since_s = self._drafted_s.get(view.peer)
        if since_s is None:
            return
        is_held = now < since_s + self._config.hold_s and view.role is not InstanceRole.MIXED
        if not is_held and not _has_foreign_work(view):
            del self._drafted_s[view.peer]
            self._fleet.draft(view, is_drafted=False)

    def on_down(self, peer: Peer) -> None:
        self._drafted_s.pop(peer, None)

    def validate(self) -> None:
        """Raises: AssertionError if other instances are drafted than this scheduler knows."""
        drafted = {peer for peer, view in self._fleet.views.items() if view.is_drafted}
        assert drafted == set(self._drafted_s), "the drafted instances are known"


def _has_foreign_work(view: InstanceView) -> bool:
    """Whether the instance has, or is about to get, requests in the phase that its own pool does not compute. A request
    that has decoded on a token instance is none, although its KV may be computed again.
    """
    report = view.report
    match view.role:
        case InstanceRole.PROMPT:
            return report.num_decoding > 0 or view.num_handoffs > 0
        case InstanceRole.TOKEN:
            return bool(view.in_flight) or report.num_running + report.num_waiting > report.num_decoding
        case InstanceRole.MIXED:
            return False
