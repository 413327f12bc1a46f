"""Operating-system processes: their placement, start, command line, and supervision (by ``actors.supervisor``)."""
