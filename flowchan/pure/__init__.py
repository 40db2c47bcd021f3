"""Channels between threads in Python, for systems without the native module (see flowchan/native.py)."""
