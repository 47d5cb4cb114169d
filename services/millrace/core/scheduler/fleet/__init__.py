"""The state that a round reads: instances, their pools, and the queues of each pool."""
