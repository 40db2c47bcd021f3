"""Observe a run from outside the program."""

from flowchan.viz.insight.metrics import prometheus

__all__ = ["prometheus"]
