"""Channels between threads in pure Python, for systems without the native module (see flowchan/native.py)."""
