"""Public channel classes, which extend the channels and ports of the native core."""
