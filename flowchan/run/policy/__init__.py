"""Plan a run and decide what its supervisor does, with plain values and pure functions without I/O."""
