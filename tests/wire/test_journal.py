"""A journal reads back as it was written."""

import io

import pytest

from actorserve.core.messages import Open, Peer, RequestSpec, SamplingParams, Started, Tick
from actorserve.errors import ProtocolError
from actorserve.wire.journal import Entry, read_entries, write_entry

_ENTRIES = [
    Entry(0.5, None, Tick()),
    Entry(1.25, Peer("worker-0", 7), Started("r", 1)),
    Entry(1.5, None, Open(RequestSpec("r", (1, 2, 3), SamplingParams(seed=2**64 - 1, max_tokens=4)))),
]


def _written() -> bytes:
    file = io.BytesIO()
    for entry in _ENTRIES:
        write_entry(file, entry)
    return file.getvalue()


def test_a_log_reads_back() -> None:
    """Local and wire messages come back equal, in order, with their times and senders."""
    assert list(read_entries(io.BytesIO(_written()))) == _ENTRIES


def test_a_log_cut_off_by_a_crash_reads_up_to_its_last_whole_entry() -> None:
    """Every cut of a log gives a prefix of its entries and no error."""
    data = _written()
    lengths = {len(list(read_entries(io.BytesIO(data[:cut])))) for cut in range(len(data))}
    assert lengths == {0, 1, 2}


def test_another_file_is_refused() -> None:
    """Reading a file that is not a journal raises ProtocolError."""
    with pytest.raises(ProtocolError):
        list(read_entries(io.BytesIO(b"hello, I am a text file")))
    with pytest.raises(ProtocolError):
        list(read_entries(io.BytesIO(b"\x00\x00\x00\x02\x91\x01")))
