"""A server under systemd: each process, or the supervisor with all of them, as a unit."""
