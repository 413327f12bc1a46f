"""The simulator: the production cores under a virtual clock, with a model of the engine and the network."""
