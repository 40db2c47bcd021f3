"""Implement the engine of a pipe: the workers that run the parts, and the program's side of the run."""
