"""Benchmarks of whole servers over HTTP: latencies, throughput, policies, the start, and the simulator's fidelity."""
