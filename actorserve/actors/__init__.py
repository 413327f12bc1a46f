"""The actors of the system. An actor is a pure core, its mailbox, and the code that performs its core's effects.

One file holds one actor: ``coordinator``, ``gateway``, ``worker`` (the shell around an engine) and ``supervisor``. Each
actor is an ``Actor`` (``actor``). The coordinator, the gateways and the workers are also ``ClusterActor``s
(``cluster_actor``). A ``ClusterActor`` has a ``node``: its process's transport, clock, journal and ``membership``.
"""
