"""Check that a declared graph can run."""
