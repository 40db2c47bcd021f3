"""Insight into a run from outside the program: its live page."""
