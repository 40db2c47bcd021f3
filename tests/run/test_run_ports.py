"""Test the channels of a run, as the supervisor controls them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from flowchan import Channel, Graph
from flowchan.run.crew.run_ports import RunPorts
from flowchan.run.policy.plan import plan


def between_two_outputs() -> RunPorts:
    """Open the channels of a stage with one input, ``source``, and two outputs, ``even`` and ``odd``."""
    graph = Graph("ports")
    even, odd = graph.source([1], name="source").partition(abs, 2, name="split")
    even.sink(abs)
    odd.sink(abs)
    return RunPorts(plan(graph, seed=1, memory=1 << 20))


@pytest.mark.parametrize(
    ("end_first", "end_second", "closed"),
    [
        (Channel.close, Channel.close, True),
        (Channel.close, Channel.stats, False),
        (Channel.close, Channel.abort, False),
        (Channel.abort, Channel.abort, False),
    ],
)
def test_input_is_closed_only_if_all_outputs_close_unbroken(
    end_first: Callable[[Any], object], end_second: Callable[[Any], object], closed: bool
) -> None:
    """A broken output is a failure, and its cause must reach the stage that waits for an item."""
    ports = between_two_outputs()
    (inputs, outputs), *_ = [pair for pair in ports._between if len(pair[1]) == 2]
    end_first(outputs[0])
    end_second(outputs[1])
    ports.close_unwanted()
    assert [channel.closed for channel in inputs] == [closed]
    assert not any(channel.broken for channel in inputs)
