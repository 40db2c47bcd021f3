"""Plan a run and decide what its supervisor does, in pure functions of plain values."""
