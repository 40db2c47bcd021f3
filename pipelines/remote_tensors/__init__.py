"""Provide tensors of the device type ``remote``. The program issues operations, and nodes run them.

:class:`RemoteNodes` starts the nodes, which are child processes on this machine or on the hosts of a pool.
``remote:1`` is then a torch device like ``cuda:1``. An operation on a remote tensor returns at once. The
client computes the result's shape and appends a command to the node's buffer. The node runs it later.

Modules:

- :mod:`remote_nodes`: starts and ends the nodes.
- :mod:`remote_device`, :mod:`device_table`: the device type, ``torch.remote``, and the table of clients.
- :mod:`remote_tensor`, :mod:`special_ops`, :mod:`remote_composites`: code that torch calls for each
  operation.
- :mod:`templates`: cache of commands.
- :mod:`remote_streams`, :mod:`local_forms`: streams and events; printing, copying and pickling of tensors.
- :mod:`backward_thread`: backward passes without the C++ device guard.
- :mod:`node_client`, :mod:`flusher`, :mod:`node_worker`: the two ends of the command channel.
- :mod:`failures_at_exit`: failures that a program without ``close()`` has not seen.
- :mod:`sent_commands`, :mod:`command_progress`: find the first operation that was lost when a node died.
- :mod:`node_copies`, :mod:`introductions`: copies between nodes.
- :mod:`handle_transfer`, :mod:`lease_watch`: remote tensors in items.
- :mod:`command_format`, :mod:`remote_failures`, :mod:`remote_errors`: code for both ends.
"""

from flowchan.pipelines.remote_tensors.remote_errors import NodeDied, RemoteError
from flowchan.pipelines.remote_tensors.remote_nodes import NodeStats, RemoteNodes
from flowchan.pipelines.remote_tensors.remote_tensor import RemoteTensor

__all__ = ["NodeDied", "NodeStats", "RemoteError", "RemoteNodes", "RemoteTensor"]
