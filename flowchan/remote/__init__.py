"""Connect programs by channels, even on different hosts."""
