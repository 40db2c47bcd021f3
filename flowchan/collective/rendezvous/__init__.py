"""Rendezvous: several methods by which processes form a group.

Each method only needs a way to exchange a few short values.
"""
