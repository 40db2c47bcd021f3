"""Parameter servers: tensors that many workers push to and pull from."""
