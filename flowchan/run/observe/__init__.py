"""Observe a run: compute statistics, find bottlenecks, write reports and traces, and feed subscribers."""
