"""What computes tokens: the torch engine, a fake one for tests, and the thread that an engine runs on."""
