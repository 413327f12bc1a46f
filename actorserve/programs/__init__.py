"""The mains of the processes: each turns settings into objects and runs them. Only a main knows all parts of a process.

The worker's main is ``workers.worker``, because only the worker's process may load torch.
"""
