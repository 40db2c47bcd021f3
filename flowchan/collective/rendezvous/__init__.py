"""How processes become members of one group: each way to tell each other a few words makes it possible."""
