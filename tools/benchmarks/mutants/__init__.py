"""``tools/bench mutants``: whether the random faults of the cores' tests find bugs that are put in on purpose."""
