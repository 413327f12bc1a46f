"""The worker process: one engine with its KV pools, on one GPU or on some cores of a CPU. Only here is torch loaded."""
