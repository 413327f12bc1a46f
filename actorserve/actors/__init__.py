"""The actors of the system. An actor is a pure core, its mailbox, and the code that performs its core's effects.

One file holds one actor: ``coordinator``, ``gateway``, ``worker`` (the shell around an engine) and ``supervisor``. All
of them stand on ``actor``. Those that talk to other processes stand on ``cluster_actor`` as well, and on a ``node``:
the transport, the clock, the journal and the ``membership`` of their process.
"""
