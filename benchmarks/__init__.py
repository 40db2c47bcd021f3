"""Benchmarks of flowchan and its peers: ``python -m benchmarks [--only NAME] [--quick]``, or ``make
bench``.

Each module measures one thing and says in ``ISOLATES`` what is inside the clock and what is not.
``measure(effort)`` measures flowchan and the peers in turn, in the same run, and compares medians. Speed is
published, never asserted.
"""
