"""Observe a run: clocks of its workers, windows of statistics, causes, reports and a feed."""
