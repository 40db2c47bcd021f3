"""Insight into a run from outside the program."""
