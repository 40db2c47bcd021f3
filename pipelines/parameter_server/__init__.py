"""Parameter servers, and weights that a trainer publishes for inference workers."""
