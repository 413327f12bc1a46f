"""How requests come to an instance, and how they leave it."""

from collections.abc import Callable, Collection, Mapping, Sequence

from actorserve.core.effects import AddToEngine, DropFromEngine
from actorserve.core.instance.load_report import LoadReporter
from actorserve.core.instance.outbox import Outbox
from actorserve.core.instance.parts import InstanceParts
from actorserve.core.instance.steps import Steps
from actorserve.core.instance.token_output import send_tokens
from actorserve.core.messages import (
    NOTHING_SPENT,
    FinishReason,
    GrammarReady,
    Message,
    Peer,
    RefusalReason,
    Refused,
    Release,
    Resend,
    Start,
    Started,
    TransferKind,
)
from actorserve.core.participant import Handler, Participant, Receiver
from actorserve.core.request import Request


class RequestLife:
    """Owns the list of requests: those that wait or have started, and the outbox of those that have ended."""

    def __init__(
        self,
        parts: InstanceParts,
        steps: Steps,
        participants: Sequence[Participant],
        receivers: Mapping[TransferKind, Receiver],
        reporter: LoadReporter,
        hand_off: Callable[[Request, Peer], None],
    ) -> None:
        """``hand_off``: has this instance hand a request over after its prompt."""
        self.outbox = Outbox(parts.config.retry_s, parts.effects)
        self.compiling: set[Request] = set()
        """Requests that no iteration names yet, because their grammars are not compiled. Never iterated."""
        self.is_draining = False
        self._parts = parts
        self._requests = parts.requests
        self._effects = parts.effects
        self._steps = steps
        self._participants = participants
        self._receivers = receivers
        self._reporter = reporter
        self._hand_off = hand_off

    @property
    def handlers(self) -> Mapping[type[Message], Handler]:
        return {
            Start: self._on_start,
            GrammarReady: self._on_grammar_ready,
            Release: self.on_release,
            Resend: self._on_resend,
        }

    def end(self, request: Request, now: float) -> None:
        """The request has finished, or is given back. Its gateway hears of it until it releases the request."""
        self._forget(request)
        self.outbox.add(request, now)

    def on_peer_down(self, peer: Peer) -> None:
        """Forget the requests of a dead gateway."""
        for request in [*self._requests.values(), *self.outbox.values()]:
            if request.gateway == peer:
                self._remove(request)

    def _on_start(self, message: Start, gateway: Peer, now: float) -> bool:
        spec, epoch = message.request, message.epoch
        present = self._find(spec.request_id)
        if present is not None and present.epoch > epoch:
            return False
        if present is not None and present.epoch == epoch:
            self._effects.send(gateway, Started(spec.request_id, epoch))
            if spec.request_id in self.outbox:
                self.outbox.send(present)
            return True
        if present is not None:
            self._remove(present)
        request = Request(spec, epoch, gateway)
        request.came_s = now
        refusal = self._refusal(request)
        if refusal is not None:
            retry_s = self._parts.config.retry_s
            refused = Refused(spec.request_id, epoch, refusal, retry_after_s=retry_s, energy=NOTHING_SPENT)
            self._effects.send(gateway, refused)
            return True
        self._reporter.accept(spec.request_id)
        self._effects.send(gateway, Started(spec.request_id, epoch))
        if request.check_finished(self._parts.config.max_tokens):
            # Its last owner died after it made the last token and before it reported the end.
            self.outbox.add(request, now)
        else:
            self._admit(request, message, now)
        return True

    def _refusal(self, request: Request) -> RefusalReason | None:
        if self.is_draining:
            return RefusalReason.DRAINING
        if not request.spec.prompt_token_ids or len(request.token_ids) > self._parts.config.max_tokens:
            return RefusalReason.TOO_LARGE
        return None

    def _admit(self, request: Request, start: Start, now: float) -> None:
        parts, transfer = self._parts, start.transfer
        self._requests[request.request_id] = request
        if transfer is not None and self._receivers[transfer.id.kind].adopt(transfer, request):
            parts.policy.add(request, now, request.num_computed, start.attained)
            # Like a request that was swapped in, it stays for as much service as the copy cost.
            request.owed_s = parts.times.transfer_s(parts.memory.bytes_of(request))
        else:
            parts.policy.add(request, now, parts.memory.prefixes.num_cached_tokens(request), start.attained)
        if request.sampling.grammar:
            self.compiling.add(request)
        if start.token_instance is not None:
            self._hand_off(request, start.token_instance)
        self._effects.append(AddToEngine(start.request))

    def _on_grammar_ready(self, message: GrammarReady, sender: Peer, now: float) -> bool:
        request = self._requests.get(message.request_id)
        if request is None or request not in self.compiling:
            return False  # gone meanwhile
        self.compiling.discard(request)
        return True

    def on_release(self, message: Release, gateway: Peer, now: float) -> None:
        request = self._find(message.request_id)
        if request is not None and request.epoch <= message.epoch:
            if message.is_complete and request.epoch == message.epoch:
                request.finish_reason = FinishReason.STOP  # what learns lengths takes it as one that ended here
            self._remove(request)

    def _on_resend(self, message: Resend, gateway: Peer, now: float) -> bool:
        request = self._find(message.request_id)
        if request is None or request.epoch != message.epoch:
            return False
        first = max(message.from_position, request.resumed_output)
        send_tokens([(request, first, request.num_output - first)], self._effects)
        if message.request_id in self.outbox:
            self.outbox.send(request)
        return True

    def _find(self, request_id: str) -> Request | None:
        return self._requests.get(request_id) or self.outbox.get(request_id)

    def _remove(self, request: Request) -> None:
        """Forget a request, in whatever state it is."""
        if self.outbox.get(request.request_id) is request:
            del self.outbox[request.request_id]
        else:
            self._forget(request)

    def _forget(self, request: Request) -> None:
        """Its blocks are free as soon as no copy and no iteration in flight uses them."""
        del self._requests[request.request_id]
        self.compiling.discard(request)
        for participant in self._participants:
            participant.on_gone(request)
        self._parts.policy.remove(request)
        self._parts.memory.drop(request)
        request.energy = self._steps.energy.forget(request)
        self._effects.append(DropFromEngine(request.request_id))

    def validate(self) -> None:
        """Raise AssertionError if an invariant does not hold."""
        requests, outbox = self._requests, self.outbox
        assert not requests.keys() & outbox.keys(), "a request is here, and has ended"
        assert not any(request.is_started for request in outbox.values()), "a request that ended holds blocks"
        assert all(request.finish_reason is None for request in requests.values()), "a finished request is still here"
        present = {id(request) for request in requests.values()}
        assert all(id(request) in present for request in self.compiling), "a request compiles, but is not here"
        assert not any(self._steps.is_running(request) for request in self.compiling), "a request runs, but compiles"
        for request in requests.values():
            if request.prompt_scores is not None and request.wants_prompt_scores:
                num_due = min(request.num_computed, request.num_prompt - 1)
                assert request.prompt_scores.num_tokens >= num_due, f"{request.request_id} lacks its prompt's scores"
        ordered: Collection[Request] = self._parts.policy.requests
        assert len(ordered) == len(requests), f"the policy orders {len(ordered)} requests of {len(requests)}"
        is_same = {id(request) for request in ordered} == present
        assert is_same, "the policy orders other requests"
