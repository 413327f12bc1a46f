"""Everything that decides: pure state machines without I/O, clock or global randomness, the same in every shell."""
