"""Start child processes that the program addresses individually, on this machine or on other hosts.

:func:`start` starts the children. Each child runs one function, whose first argument is a :class:`Parent`.
The program calls methods of one child (:class:`Child`) or of a group (:class:`Children`).

The children are the workers of one stage. The supervisor therefore starts, watches and ends them like other
workers. Each worker gets one item, a ``ChildLinks`` with the child's number and channels. If the process
dies, this item fails, and the supervisor reports the death to the program. The program then closes the
child's channels, which ends every waiting call.
"""

from flowchan.pipelines.children.child_group import Children, start
from flowchan.pipelines.children.child_handle import Child
from flowchan.pipelines.children.parent_handle import Parent, parent

__all__ = ["Child", "Children", "Parent", "parent", "start"]
