"""Plans, events, decisions, causes and statistics, as plain values and pure functions without I/O."""
