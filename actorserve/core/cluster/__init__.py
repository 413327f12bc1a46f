"""The state machine of the coordinator: the instances, the cluster's queue, and how many instances there are."""
