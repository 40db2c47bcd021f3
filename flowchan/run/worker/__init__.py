"""Run one worker: its callable, the loop of its operator, its requests and its log records."""
