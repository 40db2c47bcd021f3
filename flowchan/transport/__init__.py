"""How items and channels cross process borders."""
