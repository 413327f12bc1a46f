"""``tools/bench``: measurements of a server and its parts, compared with other systems."""
