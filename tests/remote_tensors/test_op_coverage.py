"""Test each operator of torch's database on a remote device against the CPU.

``op_differences.txt`` lists the operators with unequal results, and the reasons. If an operator's results
improve, the operator must be removed from the list. ``make test`` runs one sample for one in thirty
operators, and all samples for the listed operators. ``make soak`` runs all samples, and compares the metadata
after each operation.
"""

from __future__ import annotations

import contextlib
import fnmatch
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from metadata_check import MetadataCheck
from op_comparison import CLOSE, DIFFERENT, EQUAL, Outcome, compare
from op_samples import KINDS, Entry, entries
from support.optional_packages import optional

from flowchan.pipelines import RemoteNodes

torch = optional("torch")
if sys.version_info[:2] != (3, 11):
    pytest.skip("the database is compared on one Python", allow_module_level=True)
optional("expecttest")  # the database imports this package
pytestmark = pytest.mark.usefixtures("one_compute_thread")

EXPECTED = {"close": {CLOSE}, "varies": {EQUAL, CLOSE}, "fails": {DIFFERENT}}
LEAST_EQUAL = 0.97
FEWER = 30
"""Interval between the operators that run without ``--long``. Each kind and dtype begins at another one."""


class Allowance:
    """Entries in the list of differences."""

    def __init__(self) -> None:
        text = Path(__file__).with_name("op_differences.txt").read_text()
        lines = [line for line in text.splitlines() if line and not line.startswith("#")]
        self._lines = [[part.strip() for part in line.split("|")] for line in lines]
        assert all(len(line) == 3 and line[1] in EXPECTED and line[2] for line in self._lines)

    def expected(self, entry: Entry) -> set[str] | None:
        """Return the verdicts that the list allows for an entry, or None if the entry is not listed."""
        for pattern, verdict, _ in self._lines:
            if fnmatch.fnmatchcase(entry.name, pattern):
                return EXPECTED[verdict]
        return None


@pytest.fixture(scope="module")
def started_threads(one_compute_thread: None) -> None:
    """Load the database and use a node, to start the threads that run until the process exits."""
    entries(*KINDS[0])
    with RemoteNodes(1) as nodes:
        torch.ones(2, device=nodes[0]).cpu()


@pytest.fixture
def remote(started_threads: None) -> Iterator[str]:
    """Provide the device of a node."""
    with RemoteNodes(1) as nodes:
        yield str(nodes[0])


@pytest.mark.timeout(1200)
@pytest.mark.each_pair
@pytest.mark.parametrize(("kind", "dtype"), KINDS)
def test_operators_equal_their_local_runs(kind: str, dtype: str, remote: str, long_walk: bool) -> None:
    allowance = Allowance()
    outcomes: dict[str, Outcome] = {}
    wrong = []
    with MetadataCheck() if long_walk else contextlib.nullcontext() as check:
        for place, entry in enumerate(entries(kind, dtype), 7 * KINDS.index((kind, dtype))):
            expected = allowance.expected(entry)
            # compare all samples only if the list of allowances says that this entry must differ somewhere
            whole = long_walk or (expected is not None and EQUAL not in expected)
            if not whole and place % FEWER:
                continue
            outcome = compare(entry, remote, None if whole else 1, check)
            if not outcome.samples and outcome.verdict == EQUAL:
                continue  # both sides raise, or the samples exclude the CPU
            outcomes[entry.name] = outcome
            if outcome.verdict not in (expected or {EQUAL}):
                wrong.append(f"{entry.name}: {outcome.verdict} {outcome.reason}")
    assert not wrong, "\n".join(["update op_differences.txt, or mend:", *wrong])
    equal = sum(outcome.verdict == EQUAL for outcome in outcomes.values())
    assert not long_walk or equal >= LEAST_EQUAL * len(outcomes)


def test_list_of_differences_names_existing_operators() -> None:
    names = [entry.name for kind, dtype in KINDS for entry in entries(kind, dtype)]
    for pattern, *_ in Allowance()._lines:
        assert fnmatch.filter(names, pattern), pattern


def test_factories_run_on_the_node(remote: str) -> None:
    made = [
        torch.zeros(2, device=remote),
        torch.full((2,), 3.0, device=remote),
        torch.arange(3, device=remote),
        torch.linspace(0, 1, 3, device=remote),
        torch.eye(2, device=remote),
        torch.tensor([1, 2], device=remote),
        torch.randn(2, device=remote),
        torch.randperm(4, device=remote),
        torch.signal.windows.hann(4, device=remote),
        torch.tril_indices(3, 3, device=remote),
    ]
    assert {str(one.device) for one in made} == {remote}
