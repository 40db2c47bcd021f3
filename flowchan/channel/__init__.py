"""Extend the native channels and ports with the public channel classes."""
