"""The operator's console: a command line and a prompt for what ``core.operations.verbs`` lists."""
