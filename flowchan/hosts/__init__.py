"""Other machines: what starts our agents there."""
