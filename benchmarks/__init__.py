"""Benchmarks of flowchan and its peers.

Run them with ``python -m benchmarks [--only NAME] [--quick]`` or ``make bench``. Each module is one
benchmark, and its ``ISOLATES`` describes the method. ``measure(effort)`` measures flowchan and the peers
alternately in the same run, and compares medians. Speed is published, never asserted.
"""
