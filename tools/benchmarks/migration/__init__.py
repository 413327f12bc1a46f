"""Benchmarks with two real workers: what moving a request costs, and what a worker's death costs."""
