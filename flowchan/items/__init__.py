"""Encode items for other processes: pickles, arrays, device tensors and shared memory."""
