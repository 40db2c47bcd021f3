"""The search for duplicates of duplicates.py over hosts: they compute the hashes, and say what each has done.

    python examples/duplicates_hosts.py [DIRECTORY [POOL]]
    flowchan viz examples/duplicates_hosts.py -o duplicates_hosts.svg

DIRECTORY has to be there on every host. POOL is local:2 unless another is named: ssh:gpu1,gpu2, slurm or
ray:4.
"""

from __future__ import annotations

import argparse
from collections import Counter
from operator import itemgetter
from pathlib import Path

from duplicates import STANDARD_LIBRARY, group, show, sized_files, unreadable, with_digest

import flowchan
from flowchan import Graph
from flowchan.hosts import parse


def with_digest_and_host(file: Path) -> tuple[tuple[bytes, Path], str]:
    return with_digest(file), flowchan.worker().host


def tell(hosts: list[str]) -> None:
    lines = [f"{host} hashed {number:,} files\n" for host, number in sorted(Counter(hosts).items())]
    print("".join(lines), end="")  # at once, for the other sink prints beside this one


def duplicates_on_hosts(directory: str = str(STANDARD_LIBRARY), pool: str = "local:2") -> Graph:
    graph = Graph("duplicates on hosts")
    files = graph.source(sized_files, Path(directory), name="files")
    candidates = graph.stage(group, files, name="same size").unbatch(name="candidates")
    hashed = candidates.map(with_digest_and_host, on=parse(pool), workers=4, ordered=False, name="hash")
    hashed.errors.sink(unreadable)
    keyed, done = hashed.tee(2)
    graph.stage(group, keyed.map(itemgetter(0), name="keyed"), name="equal").collect(name="report").sink(show)
    done.map(itemgetter(1), name="host").collect(name="who").sink(tell)
    return graph


def main() -> None:
    parser = argparse.ArgumentParser(description="Find files with equal content, with hashes from hosts.")
    parser.add_argument("directory", nargs="?", default=str(STANDARD_LIBRARY))
    parser.add_argument("pool", nargs="?", default="local:2")
    asked = parser.parse_args()
    duplicates_on_hosts(asked.directory, asked.pool).run(progress=True)


if __name__ == "__main__":
    main()
