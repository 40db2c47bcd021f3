"""Observe a run: worker clocks, statistics, bottlenecks, reports and a feed."""
