"""Tensors that cross from process to process without leaving their device."""
