"""The command ``flowchan``."""
