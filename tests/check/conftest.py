from declared import graph  # noqa: F401
