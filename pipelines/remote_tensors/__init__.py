"""Tensors of the device type ``remote``: the program issues operations, and nodes run them.

:class:`RemoteNodes` starts the nodes, which are child processes on this machine or on the hosts of a pool.
``remote:1`` is then a torch device like ``cuda:1``. An operation on a remote tensor returns at once: the
client computes the result's shape, appends a command to the buffer of the node, and the node runs it later.

The files from top to bottom: :mod:`remote_nodes` (start and end of the nodes), :mod:`remote_device` (the
device type and ``torch.remote``), :mod:`remote_tensor` and :mod:`special_ops` (what torch calls for each
operation), :mod:`templates` (cache of commands), :mod:`node_client` and :mod:`node_worker` (the two ends of
the command channel), :mod:`command_format` and :mod:`remote_failures` (used by both ends).
"""

from flowchan.pipelines.remote_tensors.remote_errors import NodeDied, RemoteError
from flowchan.pipelines.remote_tensors.remote_nodes import NodeStats, RemoteNodes
from flowchan.pipelines.remote_tensors.remote_tensor import RemoteTensor

__all__ = ["NodeDied", "NodeStats", "RemoteError", "RemoteNodes", "RemoteTensor"]

for _name in __all__:
    globals()[_name].__module__ = "flowchan.pipelines"
del _name
