"""Run the examples in the docstrings of channels, ports, ``select``, ``pack`` and ``unpack``."""

from __future__ import annotations

import doctest

import pytest
from support.optional_packages import optional

import flowchan
from flowchan import Channel, In, Out

np = optional("numpy")  # imported here because the threads that it starts do not end

EXAMPLES = {
    "Channel": Channel,
    "Channel.reader": Channel.reader,
    "Channel.writer": Channel.writer,
    "Channel.abort": Channel.abort,
    "Channel.aput": Channel.aput,
    "Channel.loan": Channel.loan,
    "In.aget": In.aget,
    "Out.aput": Out.aput,
    "select": flowchan.select,
    "pack": flowchan.pack,
    "unpack": flowchan.unpack,
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_docstring_example_gives_the_printed_output(name: str) -> None:
    if name == "Channel.loan":
        np.ndarray  # noqa: B018  # skips the test without NumPy
    test = doctest.DocTestParser().get_doctest(EXAMPLES[name].__doc__ or "", {}, name, None, None)
    assert test.examples
    output: list[str] = []
    doctest.DocTestRunner().run(test, out=output.append)
    assert not output, "".join(output)
