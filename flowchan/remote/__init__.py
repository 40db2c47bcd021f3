"""Channels between programs on different hosts."""
