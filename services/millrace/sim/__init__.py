"""The simulator: the live scheduler's own decisions, on simulated clusters, at any speed."""
