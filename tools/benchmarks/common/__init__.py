"""What several benchmarks share: arguments, prompts, journals, and how to talk to and look at processes."""
