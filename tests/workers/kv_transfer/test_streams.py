"""The kernel moves many pieces of memory through a socket, in order and to the last byte."""

import ctypes
import socket
import threading

import numpy as np
import pytest
from hypothesis import given, strategies as st

from workers.kv_transfer.streams import Regions, move_in, move_out, regions, wait_at_most

PIECES, PIECE_BYTES, NUM_BLOCKS = 3, 8, 12


def bytes_of(found: Regions) -> bytes:
    return b"".join(ctypes.string_at(int(address), int(length)) for address, length in found)


@given(st.lists(st.integers(0, NUM_BLOCKS - 1), min_size=1, max_size=20), st.booleans(), st.booleans())
def test_regions_are_the_blocks_in_order(blocks: list[int], by_piece: bool, on_host: bool) -> None:
    """For any blocks, either pool and either order, the regions hold exactly the blocks' bytes."""
    flat = np.random.default_rng(0).integers(0, 256, NUM_BLOCKS * PIECES * PIECE_BYTES, dtype=np.uint8)
    array = flat.reshape(NUM_BLOCKS, PIECES, PIECE_BYTES)
    if not on_host:
        array = flat.reshape(PIECES, NUM_BLOCKS, PIECE_BYTES).transpose(1, 0, 2)
    taken = array[blocks]
    expected = taken.transpose(1, 0, 2).tobytes() if by_piece else taken.tobytes()
    assert bytes_of(regions(array, blocks, by_piece=by_piece)) == expected


def test_neighbours_are_one_region() -> None:
    """Pieces that lie side by side become few, long regions."""
    device = np.zeros((PIECES, NUM_BLOCKS, PIECE_BYTES), dtype=np.uint8).transpose(1, 0, 2)
    host = np.zeros((NUM_BLOCKS, PIECES, PIECE_BYTES), dtype=np.uint8)
    assert regions(device, (1, 2, 3, 7), by_piece=True)[:, 1].tolist() == [3 * PIECE_BYTES, PIECE_BYTES] * PIECES
    assert regions(host, (1, 2, 3, 7), by_piece=False)[:, 1].tolist() == [PIECES * PIECE_BYTES] * 4


def test_more_regions_than_a_call_takes_go_through() -> None:
    """Thousands of regions of odd sizes, cut anywhere by small buffers, arrive unchanged."""
    source = np.random.default_rng(0).integers(0, 256, (5000, 2, 333), dtype=np.uint8)
    target = np.zeros((5000, 3, 222), dtype=np.uint8)
    blocks = np.random.default_rng(1).permutation(5000).tolist()
    one, other = socket.socketpair()
    with one, other:
        for end in (one, other):
            wait_at_most(end, 10.0)
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        thread = threading.Thread(target=lambda: move_out(one, regions(source, blocks, by_piece=False)))
        thread.start()
        move_in(other, regions(target, range(5000), by_piece=False))
        thread.join()
    assert target.tobytes() == source[blocks].tobytes()


def test_waits_end() -> None:
    """A peer that sends nothing, reads nothing, or hangs up is an error."""
    one, other = socket.socketpair()
    with one, other:
        wait_at_most(one, 0.05)
        array = np.zeros((1, 1, 2**22), dtype=np.uint8)
        with pytest.raises(TimeoutError):
            move_in(one, regions(array, (0,), by_piece=False))
        with pytest.raises(TimeoutError):
            move_out(one, regions(array, (0,), by_piece=False))
        other.close()
        with pytest.raises(BrokenPipeError):
            move_out(one, regions(array, (0,), by_piece=False))
        with pytest.raises(ConnectionResetError):
            move_in(one, regions(array, (0,), by_piece=False))
