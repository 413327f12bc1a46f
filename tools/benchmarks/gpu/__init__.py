"""What a GPU is asked first: how far the engine is from the device's own speed, on models of random weights.

Every measurement also runs on a CPU with a tiny model, so that it works the first time on a GPU. Its figures then say
that they come from a CPU.
"""
