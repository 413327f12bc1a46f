"""KV on this worker: the device's and the host's pools, and the copies between them."""
