"""Rendezvous: the ways in which processes form a group.

Each needs only the exchange of a few short values.
"""
