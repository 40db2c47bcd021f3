"""Find duplicates as duplicates.py does, but compute the hashes on several hosts.

    python examples/duplicates_hosts.py [DIRECTORY [HOST …]]
    flowchan viz examples/duplicates_hosts.py -o duplicates_hosts.svg

The program prints how many files each host has hashed. DIRECTORY must exist on every host. The program
reaches the hosts with ssh. If you name no hosts, it starts two agents on this machine.
"""

from __future__ import annotations

import argparse
from collections import Counter
from operator import itemgetter
from pathlib import Path

from duplicates import STANDARD_LIBRARY, group, show, sized_files, unreadable, with_digest

import flowchan
from flowchan import Graph
from flowchan.hosts import local, ssh


def with_digest_and_host(file: Path) -> tuple[tuple[bytes, Path], str]:
    return with_digest(file), flowchan.worker().host


def tell(hosts: list[str]) -> None:
    lines = [f"{host} hashed {number:,} files\n" for host, number in sorted(Counter(hosts).items())]
    print("".join(lines), end="")  # one call, so that these lines do not mix with the other sink's


def duplicates_on_hosts(directory: str = str(STANDARD_LIBRARY), *hosts: str) -> Graph:
    pool = ssh(*hosts) if hosts else local(2)
    graph = Graph("duplicates on hosts")
    files = graph.source(sized_files, Path(directory), name="files")
    candidates = graph.stage(group, files, name="same size").unbatch(name="candidates")
    hashed = candidates.map(with_digest_and_host, on=pool, workers=4, ordered=False, name="hash")
    hashed.errors.sink(unreadable)
    keyed, done = hashed.tee(2)
    graph.stage(group, keyed.map(itemgetter(0), name="keyed"), name="equal").collect(name="report").sink(show)
    done.map(itemgetter(1), name="host").collect(name="who").sink(tell)
    return graph


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Find files with the same contents; several hosts compute the hashes of the files."
    )
    parser.add_argument("directory", nargs="?", default=str(STANDARD_LIBRARY))
    parser.add_argument("hosts", nargs="*")
    asked = parser.parse_args()
    duplicates_on_hosts(asked.directory, *asked.hosts).run(progress=True)


if __name__ == "__main__":
    main()
