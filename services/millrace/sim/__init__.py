"""Simulates clusters with the live scheduler's own decisions, at any speed."""
