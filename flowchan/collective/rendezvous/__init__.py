"""Form groups by rendezvous, in several ways.

Each of them only needs a way to exchange a few short values.
"""
