"""Names of the test files that take the longest time.

These files run first, one in each process. If they ran last, the other processes would have nothing left to
do. Use ``--durations`` to find out whether the list is still right.
"""

LONG_FILES = frozenset(
    {
        # files that "make test" runs
        "test_child_kills.py",
        "test_cli_launch.py",
        "test_conftest.py",
        "test_docs.py",
        "test_docstrings.py",
        "test_protocol_model.py",
        "test_refused_calls.py",
        "test_start_methods.py",
        # files of make soak
        "test_new_transport.py",
        "test_fault_walk.py",
        "test_native_links.py",
        "test_pool_after_failures.py",
        "test_programs.py",
        "test_random_breaks.py",
        "test_sequential_training.py",
    }
)
