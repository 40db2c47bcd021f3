"""Data-parallel training with the members of a group."""
