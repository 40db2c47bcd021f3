"""Engine of a pipe: the workers that run the parts of a model, and the program's side of their run."""
