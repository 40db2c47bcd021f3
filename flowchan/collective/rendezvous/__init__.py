"""Form a group by rendezvous.

Each module implements one method of rendezvous, which only has to exchange a few short values.
"""
