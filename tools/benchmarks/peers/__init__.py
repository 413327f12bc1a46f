"""What measurements compare: each engine in a process of its own, which does one measurement at a time when told to."""
