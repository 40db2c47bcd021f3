"""Starts, watches, ends and recovers the workers of a run on one machine."""
