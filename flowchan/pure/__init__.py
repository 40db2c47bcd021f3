"""Provide channels between threads in pure Python, for systems without the native module (see native.py)."""
