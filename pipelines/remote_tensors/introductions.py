"""Tell nodes about each other's inboxes, so that tensors do not pass through the program."""

from __future__ import annotations

from flowchan import ChannelError
from flowchan.hosts import open_channel
from flowchan.pipelines.remote_tensors.node_client import NodeClient
from flowchan.pipelines.remote_tensors.node_copies import WAITING, log
from flowchan.pipelines.remote_tensors.remote_errors import NodeDied, RemoteError


def introduce(sender: NodeClient, receiver: NodeClient) -> None:
    """Tell ``sender`` the inbox of ``receiver``, once.

    The program also keeps the inbox, to report the sender's death.

    If one of the nodes is on another host, the call waits until the sender has connected to the inbox.
    """
    if receiver.place.id in sender.introduced:
        return
    reach = receiver.place.reach or sender.place.reach
    if reach is None:
        assert receiver.place.inbox is not None
        # Send first. If a signal handler raises an exception before the next line, the node gets the inbox
        # again.
        sender.send("peer", receiver.place.id, receiver.place.inbox)
        sender.introduced[receiver.place.id] = receiver.place.inbox
    else:
        try:
            at = receiver.ask("inbox", reach)
            inbox = open_channel(at[0], at[1], tls=at[2])
            sender.ask("peer", receiver.place.id, *at)
            sender.introduced[receiver.place.id] = inbox
        except NodeDied:
            raise
        except (RemoteError, ChannelError) as error:
            log.warning(
                "flowchan: copies from %s to %s go through this program: %s",
                sender.device,
                receiver.device,
                str(error.__cause__ or error),
            )
            if receiver.relay is None:
                relay = reach.channel(WAITING)
                receiver.send("relay", relay)
                receiver.relay = relay
            sender.send("peer", receiver.place.id, receiver.relay)
            sender.introduced[receiver.place.id] = receiver.relay
