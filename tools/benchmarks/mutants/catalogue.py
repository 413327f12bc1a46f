"""The mutants. Each has a bug that costs a client its tokens, lets two workers run one request, or leaks memory."""

from typing import Final

from tools.benchmarks.mutants.mutant import Mutant

_ONE_OWNER = "a gateway names each epoch to one worker only, so no other worker knows it"

_TOKENS = "gateway/owner_messages.py"
_PLACER = "gateway/placer.py"
_SOURCE = "migration/source.py"
_DESTINATION = "migration/destination.py"
_CHECKPOINTS = "checkpoints/source.py"
_STORE = "checkpoints/store.py"
_LIFE = "instance/request_life.py"
_MEMORY = "kv/kv_memory.py"

GATEWAYS: Final = (
    Mutant(
        "the gateway ignores the epochs of tokens",
        _TOKENS,
        "if session is None or session.epoch != epochs[row] or session.instance",
        "if session is None or session.instance",
    ),
    Mutant(
        "the gateway ignores the epochs of all other messages",
        _TOKENS,
        "if session is not None and session.epoch == epoch and session.instance == sender:",
        "if session is not None and session.instance == sender:",
    ),
    Mutant(
        "the gateway takes tokens from any worker",
        _TOKENS,
        "session.epoch != epochs[row] or session.instance != sender or worker is None",
        "session.epoch != epochs[row] or worker is None",
        why_equivalent=_ONE_OWNER,
    ),
    Mutant(
        "the gateway takes other messages from any worker",
        _TOKENS,
        "session.epoch == epoch and session.instance == sender:",
        "session.epoch == epoch:",
        why_equivalent=_ONE_OWNER,
    ),
    Mutant(
        "the gateway ignores the epoch of a placement",
        _PLACER,
        "if session is None or session.epoch != message.epoch:\n",
        "if session is None:\n",
    ),
    Mutant(
        "a request ends before its last token",
        _TOKENS,
        "if message.num_output_tokens > len(session.output):",
        "if False:",
    ),
    Mutant(
        "the gateway does not notice that tokens are missing",
        _TOKENS,
        "if first < begin:",
        "if False:",
    ),
    Mutant(
        "a new epoch keeps the old one's hand-over",
        "gateway/session.py",
        "self.transfer = self.hand_over = self.checkpointed = self.token_instance = None",
        "self.transfer = self.checkpointed = self.token_instance = None",
    ),
    Mutant(
        "a new epoch keeps the old one's checkpoints",
        "gateway/session.py",
        "self.transfer = self.hand_over = self.checkpointed = self.token_instance = None",
        "self.transfer = self.hand_over = self.token_instance = None",
    ),
    Mutant(
        "a request is handed over to a worker that is down",
        _TOKENS,
        "if not self._peers.accepts_requests(hand_over.to):",
        "if False:",
    ),
    Mutant(
        "a request goes on at a holder that is down",
        _PLACER,
        "and checkpointed is not None and checkpointed.holder in self._peers.workers:",
        "and checkpointed is not None:",
    ),
    Mutant(
        "a refused hand-over is not answered",
        _TOKENS,
        "effects.append(Send(owner, Keep(hand_over.request_id, hand_over.epoch)))",
        "pass",
    ),
)

MIGRATIONS: Final = (
    Mutant(
        "preemption does not void a move",
        _SOURCE,
        "return request not in self.paused and (request.blocks is not outgoing.blocks or request.copy_id is not None)",
        "return False",
    ),
    Mutant(
        "a swap out does not void a move",
        _SOURCE,
        "(request.blocks is not outgoing.blocks or request.copy_id is not None)",
        "request.blocks is not outgoing.blocks",
    ),
    Mutant(
        "a request that stands still still runs",
        "instance/state.py",
        "steps.look_ahead(now) | self.migration_source.paused | self.compiling",
        "steps.look_ahead(now) | self.compiling",
    ),
    Mutant(
        "the last stage does not wait for steps in flight",
        _SOURCE,
        "LAST_DUE:\n                if not self._steps.is_running(request):\n                    self._begin_last",
        "LAST_DUE:\n                if True:\n                    self._begin_last",
    ),
    Mutant(
        "the timeout of a hand-over is a failure",
        _SOURCE,
        "            if outgoing.phase is Phase.HANDING_OVER:\n                self._ask_to_hand_over(outgoing, now)\n"
        "            else:\n                self._withdraw(outgoing)\n                self._cancel(outgoing)",
        "            self._withdraw(outgoing)\n            self._cancel(outgoing)",
    ),
    Mutant(
        "the death of the destination ends a hand-over",
        _SOURCE,
        "if outgoing.to == peer and outgoing.phase is not Phase.HANDING_OVER:",
        "if outgoing.to == peer:",
    ),
    Mutant(
        "the destination can decline a hand-over",
        _SOURCE,
        "if outgoing is None or outgoing.phase is Phase.HANDING_OVER:\n            return False\n        self._cancel",
        "if outgoing is None:\n            return False\n        self._cancel",
    ),
    Mutant(
        "a late Keep of another epoch counts",
        _SOURCE,
        "or outgoing.phase is not Phase.HANDING_OVER or outgoing.request.epoch != message.epoch:",
        "or outgoing.phase is not Phase.HANDING_OVER:",
    ),
    Mutant(
        "a request that was kept stands still for ever",
        _SOURCE,
        "del self._outgoing[outgoing.request.request_id]\n        self.paused.discard(outgoing.request)",
        "del self._outgoing[outgoing.request.request_id]",
    ),
    Mutant(
        "any stage's copy counts as this stage's",
        _SOURCE,
        "if outgoing.phase is not Phase.COPYING or message.stage != outgoing.stage:",
        "if outgoing.phase is not Phase.COPYING:",
    ),
    Mutant(
        "requests move in the middle of a swap",
        "migration/candidates.py",
        "return request.has_decoded and request.copy_id is None and request.num_uncomputed == 1",
        "return request.has_decoded and request.num_uncomputed == 1",
    ),
    Mutant(
        "the last stage lacks a row",
        _SOURCE,
        "outgoing.num_told = len(request.token_ids)\n        outgoing.num_offered = num_rows",
        "outgoing.num_told = len(request.token_ids)\n        outgoing.num_offered = num_rows + 1",
    ),
    Mutant(
        "KV that an iteration still writes is offered to workers that cannot follow it",
        _SOURCE,
        "knows_tokens and outgoing.to in self._followers and",
        "knows_tokens and",
    ),
    Mutant(
        "a request is handed over while an iteration computes its KV",
        _SOURCE,
        "if self._steps.is_running(outgoing.request):\n                outgoing.phase,",
        "if False:\n                outgoing.phase,",
    ),
    Mutant(
        "blocks that were given up under a copy still count",
        _SOURCE,
        "return not outgoing.has_followed_blocks",
        "return False",
    ),
    Mutant(
        "a failed copy of a migration counts as a copy",
        _DESTINATION,
        "        if failed:\n            self._decline(transfer, DeclineReason.UNREACHABLE)",
        "        if False:\n            self._decline(transfer, DeclineReason.UNREACHABLE)",
    ),
    Mutant(
        "KV is whole before the last stage",
        _DESTINATION,
        "return self.is_last and not self.is_copying",
        "return not self.is_copying",
    ),
    Mutant(
        "KV is whole before the last copy ends",
        _DESTINATION,
        "return self.is_last and not self.is_copying",
        "return self.is_last",
    ),
    Mutant(
        "a migration is adopted without comparing tokens",
        _DESTINATION,
        "if not incoming.is_whole or kv.token_ids != token_ids or",
        "if not incoming.is_whole or",
    ),
    Mutant(
        "the destination takes stages in any order",
        _DESTINATION,
        "if incoming is None or number != incoming.stage + 1 or incoming.is_copying or incoming.is_last:",
        "if incoming is None or incoming.is_copying or incoming.is_last:",
        why_equivalent="each stage but the last adds rows and tokens, so an older stage ends before the rows that the "
        "destination has and is refused, and KV with a gap lacks tokens that the request has and is not adopted",
    ),
    Mutant(
        "the destination ignores that a move is withdrawn",
        _DESTINATION,
        "        if incoming is not None:\n            self._drop(incoming)\n\n    def on_fetched",
        "        if False:\n            self._drop(incoming)\n\n    def on_fetched",
    ),
    Mutant(
        "the destination ignores the death of a gateway",
        _DESTINATION,
        "if incoming.gateway == peer or (incoming.transfer.source == peer and not incoming.is_whole):",
        "if incoming.transfer.source == peer and not incoming.is_whole:",
    ),
    Mutant(
        "the destination keeps blocks of a move that failed",
        _DESTINATION,
        "[incoming.transfer]\n        self._effects += self._memory.pools.release(incoming.kv)",
        "[incoming.transfer]",
    ),
    Mutant(
        "the destination copies what its prefix cache has, to the wrong places",
        _DESTINATION,
        "num_skipped = memory.rows.count(begin, found_end, kv.first_row, end)",
        "num_skipped = 0",
    ),
    Mutant(
        "no migration is ever adopted",
        _DESTINATION,
        "if not incoming.is_whole or kv.token_ids",
        "if True or kv.token_ids",
    ),
)

CHECKPOINTS: Final = (
    Mutant(
        "a voided checkpoint is confirmed",
        _CHECKPOINTS,
        "if request.blocks is not checkpoints.blocks:\n            return False",
        "if False:\n            return False",
    ),
    Mutant(
        "a checkpoint is confirmed although its window was given up",
        _CHECKPOINTS,
        "return not had_window or request.first_row <= max(asked.num_confirmed, rows.first_seen(end))",
        "return True",
    ),
    Mutant(
        "any read's answer confirms the newest read",
        _CHECKPOINTS,
        "if asked is not None and message.stage == checkpoints.stage:",
        "if asked is not None:",
    ),
    Mutant(
        "a failed copy of a checkpoint counts as a copy",
        _STORE,
        "        if failed:\n            stored.stage -= 1",
        "        if False:\n            stored.stage -= 1",
    ),
    Mutant(
        "the holder confirms what is still being read",
        _STORE,
        "if stored.stage == message.stage and stored.kv.copy_id is None:\n            self._confirm",
        "if True:\n            self._confirm",
    ),
    Mutant(
        "the holder keeps what was read and not confirmed",
        _STORE,
        "        self._void_unconfirmed(stored)\n        stored.deadline_s",
        "        stored.deadline_s",
    ),
    Mutant(
        "a request goes on from rows that were not confirmed",
        _STORE,
        "num_rows = min(stored.num_confirmed, (len(request.token_ids) - 1) // size)",
        "num_rows = min(self._num_rows(stored), (len(request.token_ids) - 1) // size)",
    ),
    Mutant(
        "a checkpoint is adopted without comparing tokens",
        _STORE,
        "kv.token_ids[:num_tokens] != request.token_ids[:num_tokens]\n            or not request.may_reuse_kv",
        "not request.may_reuse_kv",
    ),
    Mutant(
        "a request whose prompt is to be scored goes on from a checkpoint",
        _STORE,
        "            or not request.may_reuse_kv\n",
        "",
    ),
    Mutant(
        "the holder frees a row that a later token sees",
        _STORE,
        "first_row = self._rows.first_seen(num_rows - 1)",
        "first_row = self._rows.first_seen(num_rows + 1)",
    ),
    Mutant(
        "the holder keeps a dead gateway's checkpoints",
        _STORE,
        "            if stored.gateway == peer:\n                self._drop(stored)\n            elif",
        "            if",
    ),
    Mutant(
        "no checkpoint is ever adopted",
        _STORE,
        "num_rows = min(stored.num_confirmed, (len(request.token_ids) - 1) // size)\n        num_tokens, first_row",
        "num_rows = 0\n        num_tokens, first_row",
    ),
)

WORKERS: Final = (
    Mutant(
        "an older Start replaces a newer one",
        _LIFE,
        "if present is not None and present.epoch > epoch:",
        "if False:",
    ),
    Mutant(
        "an older Release ends a newer epoch",
        _LIFE,
        "if request is not None and request.epoch <= message.epoch:",
        "if request is not None:",
    ),
    Mutant(
        "a finished request is not reported again",
        "instance/outbox.py",
        "            for request in self.values():\n                self.send(request)\n",
        "",
    ),
    Mutant(
        "a worker keeps the requests of a dead gateway",
        _LIFE,
        "            if request.gateway == peer:\n                self._remove(request)",
        "            pass",
    ),
    Mutant(
        "blocks are free while a step writes them",
        _MEMORY,
        "if blocks and self.is_running(holding):",
        "if False:",
    ),
    Mutant(
        "a swap begins while a step writes the blocks",
        _MEMORY,
        "        if self.is_running(holding):\n            self._later_swaps",
        "        if False:\n            self._later_swaps",
    ),
    Mutant(
        "blocks are free while a copy from another worker writes them",
        "kv/kv_pools.py",
        "            written.update(fetch.blocks)\n            cancels",
        "            fetch.blocks = ()\n            cancels",
    ),
)

COORDINATORS: Final = (
    Mutant(
        "two requests reserve one instance",
        "placement/reservations.py",
        "if view.reserved_for is None and view.can_hold(place)",
        "if view.can_hold(place)",
    ),
    Mutant(
        "a reserved instance takes other requests",
        "placement/dispatch.py",
        "is_open = view.reserved_for is None or view.reserved_for.request_id == place.request_id",
        "is_open = True",
    ),
    Mutant(
        "a request that leaves the queue keeps its reservation",
        "cluster/state.py",
        "        self.queue.remove(request_id, now)\n        self.fleet.release(request_id)",
        "        self.queue.remove(request_id, now)",
    ),
    Mutant(
        "an older load report replaces a newer one",
        "placement/fleet.py",
        "elif report.sequence <= view.report.sequence:",
        "elif False:",
    ),
    Mutant(
        "an older Unplace takes back a newer placement",
        "placement/fleet.py",
        "if placement is not None and placement.placed.epoch <= epoch:",
        "if placement is not None:",
    ),
    Mutant(
        "a report confirms requests that were placed elsewhere since",
        "placement/placements.py",
        "if self._views.get(request_id) is view:",
        "if request_id in self._views:",
    ),
    Mutant(
        "a move that ended is still promised",
        "migration/pairing.py",
        "        self._set_left(move, 0)\n        del self.moves[move.source.peer]",
        "        del self.moves[move.source.peer]",
    ),
    Mutant(
        "a move to an instance that died goes on",
        "migration/pairing.py",
        "if peer in (move.source.peer, move.destination.peer):",
        "if peer == move.source.peer:",
    ),
)

MUTANTS: Final = (*GATEWAYS, *MIGRATIONS, *CHECKPOINTS, *WORKERS, *COORDINATORS)
