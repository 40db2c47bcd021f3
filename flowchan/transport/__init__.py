"""How bytes and descriptors reach another process, and another host."""
