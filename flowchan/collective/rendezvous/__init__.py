"""Form a group by rendezvous.

Each module implements one method, which only needs a means to exchange a few short values.
"""
