"""Which requests a worker started with KV that another worker had computed, as its journal tells."""

from dataclasses import dataclass
from pathlib import Path

from actorserve.core.instance.state import InstanceState
from actorserve.core.messages import Start, TransferKind
from actorserve.core.replay import make_core
from actorserve.wire.journal import Entry, read_records
from actorserve.wire.recipes import parse_recipe


@dataclass(frozen=True)
class KVStart:
    """A request that came with a copy of its KV, in a transfer of this ``kind``.

    ``num_computed`` of its tokens needed no computing because of the copy; 0 if the copy was of no use.
    """

    request_id: str
    kind: TransferKind
    num_tokens: int
    num_computed: int


def kv_starts(journal: Path) -> list[KVStart]:
    """All such starts of the worker of this journal, in order."""
    found: list[KVStart] = []
    with journal.open("rb") as file:
        records = read_records(file)
        recipe = next(records)
        assert isinstance(recipe, str)
        core = make_core(parse_recipe(recipe))
        assert isinstance(core, InstanceState)
        for entry in records:
            if not isinstance(entry, Entry):
                continue
            known = core.requests.get(entry.message.request.request_id) if isinstance(entry.message, Start) else None
            core.handle(entry.message, entry.now, entry.sender)
            match entry.message:
                case Start(request=spec, transfer=transfer) if transfer is not None:
                    request = core.requests.get(spec.request_id)
                    if request is None or request is known:
                        continue  # refused, or a repeat
                    # What the prefix cache had counts as cached. What a copy had does not.
                    num_computed = request.num_computed if request.num_cached_tokens == 0 else 0
                    found.append(KVStart(spec.request_id, transfer.id.kind, len(request.token_ids), num_computed))
    return found
