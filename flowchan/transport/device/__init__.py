"""Transfer tensors between processes without leaving their device."""
