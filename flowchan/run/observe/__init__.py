"""What can be seen of a run while it goes on: clocks of its workers, windows of statistics, causes, and a
feed."""
