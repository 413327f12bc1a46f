"""Key pairs for tests."""

import zmq

from actorserve.wire.trust import KeyPair


def make_pair() -> KeyPair:
    """A fresh key pair."""
    public_key, secret_key = zmq.curve_keypair()
    return KeyPair(public_key.decode(), secret_key.decode())
