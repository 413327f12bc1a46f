"""The parts of a read, in the order in which source and reader move them."""

from collections.abc import Iterator
from dataclasses import dataclass

from actorserve.core.messages import KVTicket
from workers.kv.layer_progress import mark


@dataclass(frozen=True, slots=True)
class Part:
    """Those of the read's blocks from ``begin`` to ``end``, and of these the pieces of ``pieces``. They may be read
    when the source's progress is at ``least`` (``workers.kv.layer_progress``).
    """

    begin: int
    end: int
    pieces: slice
    least: int = 0

    @property
    def num_pieces(self) -> int:
        begin, end = self.pieces.start, self.pieces.stop
        assert isinstance(begin, int)
        assert isinstance(end, int)
        return end - begin

    def num_bytes(self, piece_bytes: int) -> int:
        return (self.end - self.begin) * self.num_pieces * piece_bytes


def parts_of(ticket: KVTicket, num_skipped: int, per_part: int, num_pieces: int, num_layers: int) -> Iterator[Part]:
    """The parts of a read of the ticket's blocks except the first ``num_skipped``, at most ``per_part`` blocks each.
    A block has ``num_pieces`` pieces, one layer's after another's.
    """
    num_blocks, least = len(ticket.blocks) - num_skipped, 0
    num_runs = num_layers if ticket.by_layer else 1
    per_run = num_pieces // num_runs
    for run in range(num_runs):
        if ticket.step_id:
            least = mark(ticket.step_id, run + 1 if ticket.by_layer else num_layers)
        pieces = slice(run * per_run, (run + 1) * per_run)
        for begin in range(0, num_blocks, per_part):
            yield Part(begin, min(begin + per_part, num_blocks), pieces, least)
