"""Define the public channel classes on top of the native channels and ports."""
