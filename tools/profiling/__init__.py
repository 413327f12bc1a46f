"""``tools/profile``: measure the engine's times on this hardware, and fit profiles to published measurements."""
