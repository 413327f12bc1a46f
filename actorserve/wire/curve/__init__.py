"""CURVE, ZeroMQ's encryption: key files, sockets, and who may connect. ``wire.trust`` says what a key allows."""
