"""Names of the test files that take the longest time.

They run first, so that at the end of a run, no process works alone. ``--durations`` shows when the list needs
a change.
"""

LONG_FILES = frozenset(
    {
        # in make test
        "test_child_kills.py",
        "test_cli_launch.py",
        "test_conftest.py",
        "test_docs.py",
        "test_protocol_model.py",
        "test_refused_calls.py",
        "test_start_methods.py",
        # in make test, with torch
        "test_autograd.py",
        "test_module.py",
        "test_torch_backend.py",
        "test_tracing.py",
        "test_training.py",
        "test_training_state.py",
        # in make soak
        "test_new_transport.py",
        "test_fault_walk.py",
        "test_native_links.py",
        "test_pool_after_failures.py",
        "test_programs.py",
        "test_random_breaks.py",
        "test_sequential_training.py",
    }
)
