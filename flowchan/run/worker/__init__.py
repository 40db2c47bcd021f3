"""Run one worker: build its callable, run its operator's loop, and handle its requests and log records."""
