"""Connect programs, which may run on different hosts, by channels."""
