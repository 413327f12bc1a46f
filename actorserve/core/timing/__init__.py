"""How long iterations and copies take: measured profiles, and their correction while the engine runs."""
