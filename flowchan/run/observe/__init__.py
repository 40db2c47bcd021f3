"""Observe a run: worker clocks, statistics, causes of its speed, reports and a feed."""
