"""Plans, events, decisions, causes and statistics as values and pure functions, without I/O."""
