"""Processes that the program addresses one by one, on this machine and on hosts.

:func:`start` starts them. Each child runs one function, whose first argument is its :class:`Parent`. The
program calls the methods of one :class:`Child`, or of a group, :class:`Children`.

The children are the workers of one stage, so they start, die and end as such workers do. The only item of
each worker is the ``ChildLinks`` of its child: its number and its channels. If the process dies, this item
fails, and the supervisor reports the death to the program. The program then closes the channels of this
child, so every waiting call ends.
"""

from flowchan.pipelines.children.child_handles import Child, Children, start
from flowchan.pipelines.children.parent_handle import Parent, parent

__all__ = ["Child", "Children", "Parent", "parent", "start"]

for _name in __all__:
    globals()[_name].__module__ = "flowchan.pipelines.children"
del _name
