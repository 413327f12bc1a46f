"""Operating-system processes: the supervisor that starts and restarts them, and the frame that each of them runs in."""
