"""Helpers that tests, benchmarks and soaks share."""
