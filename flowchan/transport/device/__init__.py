"""Transfer of tensors between processes without leaving their device."""
