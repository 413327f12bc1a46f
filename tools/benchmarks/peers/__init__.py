"""The systems that measurements compare: each runs in a process of its own, and does one measurement at a time."""
