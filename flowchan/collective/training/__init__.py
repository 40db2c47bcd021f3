"""Data-parallel training with a group."""
