"""Engine of a pipe: the workers with the parts of a model, and the program's side of their run."""
