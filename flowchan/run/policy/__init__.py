"""Decides without I/O: plans, events, decisions, causes and statistics as values and pure functions."""
