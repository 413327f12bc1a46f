"""The ``main`` of every process. It makes the process's objects from the settings, and runs them.

The worker's main is ``workers.worker``, because only the worker's process may load torch.
"""
