"""Public channel classes, which extend the native channels and ports."""
