"""Run a worker: build its callable, run its operator's loop, and forward its requests and log records."""
