"""Operating-system processes: how they are placed, started, framed, and supervised (by ``actors.supervisor``)."""
