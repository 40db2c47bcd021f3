"""Benchmarks of flowchan and its peers: ``python -m benchmarks [--only NAME] [--quick]``, or ``make bench``.

Each module measures one thing, and its ``ISOLATES`` says what the clock includes. ``measure(effort)``
measures flowchan and the peers in turn, in the same run, and compares medians. Speed is published, never
asserted.
"""
