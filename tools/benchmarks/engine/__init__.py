"""Benchmarks of the engine alone: tokens per second, accuracy, and where the time of an iteration goes."""
