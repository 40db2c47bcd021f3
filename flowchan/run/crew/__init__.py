"""Start, watch, end and recover the workers of a run on one machine."""
