"""Whether a declared graph can run."""
