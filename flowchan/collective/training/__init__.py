"""Provide data-parallel training on the members of a group."""
