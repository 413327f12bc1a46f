"""How true the simulator is: its schedule, the profile, and both together, against a real worker."""
