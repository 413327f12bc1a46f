"""``tools/bench``: measurements of a server, of its parts, and of other systems beside them."""
