"""Power: what the GPUs and the host take, read from their drivers, and the process that sets power caps."""
