"""Where KV lies: blocks of the device's and the host's pools, shared prefixes, and tickets to read them."""
