"""The engine behind a pipe: workers that hold parts of a model, and the program's side of their run."""
