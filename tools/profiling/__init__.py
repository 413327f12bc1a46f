"""``tools/profile``: measure what this engine takes on this hardware, and fit profiles to published measurements."""
