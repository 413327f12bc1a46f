"""KV blocks from one worker's pools into another's. The destination reads; the source never writes.

Each worker has one ``transfer.KVTransfer``. It chooses a way for each source and each ticket:

- both workers on one host, and the pool in memory that can be mapped: ``mapped`` copies once, from pool to pool;
- both on GPUs of one host: ``cuda_ipc``;
- otherwise the source sends, on threads of its own: over stream sockets (``data_server`` and ``data_client``), or
  between hosts with keys over encrypted ones (``curve``).

A reader writes only into its own pool, so a source that was wrongly taken for dead cannot overwrite KV elsewhere.
"""
