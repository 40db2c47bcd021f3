"""Run a declared graph: its workers, supervisor, statistics and results."""
