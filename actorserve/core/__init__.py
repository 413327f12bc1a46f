"""Everything that decides: pure state machines without I/O, clock or global randomness, the same in every shell.

Three of them are told messages: ``instance.state``, ``cluster.state`` (the coordinator's) and ``gateway.state``. Each
paper's algorithm is one file:

- FastServe: the skip-join MLFQ (Algorithm 1) in ``scheduling.mlfq``, proactive swapping in ``scheduling.swapping``.
- Llumnix: virtual usage and freeness (Algorithm 1) in ``placement.freeness``, dispatch in ``placement.dispatch``, live
  migration in ``migration.source`` and ``migration.destination``, pairing in ``migration.pairing``, scaling in
  ``cluster.scaling``.

Imports between these folders have one direction: messages, kv, timing, scheduling, placement, migration, checkpoints,
then instance, cluster and gateway.
"""
