"""Check whether a declared graph can run."""
