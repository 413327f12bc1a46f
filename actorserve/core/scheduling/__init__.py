"""Which requests run next on one instance: FastServe's skip-join MLFQ, batching and proactive swapping."""
