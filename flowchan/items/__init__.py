"""Encode items: pickles, arrays, device tensors and shared memory."""
