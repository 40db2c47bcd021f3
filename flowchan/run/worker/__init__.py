"""Run one worker: its callable, operator loop, requests and log records."""
