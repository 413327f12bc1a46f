"""KV blocks from one worker's pools into another's: the destination reads, the source is only read from.

``transfer.KVTransfer`` is what a worker holds. It chooses a way for each source and each ticket:

- both on one host, and the pool in memory that can be mapped: ``mapped`` copies from the one into the other, once;
- both on GPUs of one host: ``cuda_ipc``;
- both with NIXL, where that was asked for: ``nixl``;
- else the source sends: ``data_server`` and ``data_client``, over stream sockets and threads of their own.

A reader cannot harm: it writes into its own pool alone, and a source that was taken for dead writes into nobody's.
"""
