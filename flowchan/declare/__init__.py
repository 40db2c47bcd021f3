"""Declare graphs as frozen values. Nothing in this package runs a stage."""
