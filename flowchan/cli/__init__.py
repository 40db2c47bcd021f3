"""Run the ``flowchan`` command."""
