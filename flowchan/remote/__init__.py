"""Channels between programs, also on different hosts."""
