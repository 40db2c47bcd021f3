"""Form a group by rendezvous, in one of several ways.

Each way only needs a means to exchange a few short values.
"""
