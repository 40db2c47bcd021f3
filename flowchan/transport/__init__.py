"""Transfer of bytes, descriptors and device memory to other processes and hosts."""
