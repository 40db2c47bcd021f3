from support.graph_samples import graph  # noqa: F401
