"""Benchmarks of what passes between processes: actor calls, placements, and KV blocks."""
