"""Runs instances that prefill and decode in one process: as a pair, or in the same batches."""
