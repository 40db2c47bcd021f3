"""Channels as users hold them: the native core's, with what is easier said in Python."""
