"""Test the probes of hosts, including those that fail and those that never connect."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from click.testing import CliRunner

from flowchan.cli.commands import main
from flowchan.errors import HostError
from flowchan.hosts import probe
from flowchan.hosts.providers.local import Local, local
from flowchan.hosts.providers.provider import Launch
from flowchan.hosts.providers.ssh import ssh
from flowchan.hosts.spec import Spec
from flowchan.transport.addresses import address_towards

TOWARDS = {"local-1": "127.0.0.1", "local-2": "127.0.0.1", "local-3": "no.such.host.invalid"}


@dataclass(frozen=True)
class Odd(Local):
    """A provider whose first host works, while every other host runs a faulty program."""

    programs: tuple[str, ...] = ()

    def listen_at(self, hosts: Sequence[str] | None = None) -> str:
        return address_towards("odd", {host: TOWARDS.get(host, host) for host in hosts or self.hosts})

    def start(self, number: int, launch: Launch) -> Any:
        if number == 0:
            return super().start(number, launch)
        program = self.programs[number - 1]
        if not program:
            raise HostError("local-2 is closed today", "local-2")
        return super().start(number, Launch(("-c", program), launch.stdin))


def odd(*programs: str) -> Odd:
    return Odd(1 + len(programs), programs)


TELLING = """
from flowchan.hosts import probe
truly = probe._own_facts()
probe._own_facts = lambda: {{**truly, {what!r}: "0.0.1"}}
probe.main()
"""


def test_probe_reports_host_facts_and_measures_the_connection():
    one, two = probe.check_hosts(local(2))
    assert (one.host, two.host) == ("local-1", "local-2")
    for facts in (one, two):
        assert facts.problem == ""
        assert facts.python == platform.python_version()
        assert facts.flowchan == importlib.metadata.version("flowchan")
        assert facts.cores == len(os.sched_getaffinity(0))
        assert facts.memory > 0
        assert facts.round_trip > 0
        assert facts.rate > 0


@pytest.mark.parametrize(
    ("program", "problem"),
    [
        ("", "local-2 is closed today"),
        ("raise SystemExit(7)", "the agent local-2 exited with code 7 without finishing"),
        (TELLING.format(what="flowchan"), "local-2 has flowchan 0.0.1, but this program has "),
        (TELLING.format(what="python"), "local-2 has Python 0.0.1, but this program has "),
    ],
)
def test_probe_reports_an_unusable_host_and_measures_the_others(program, problem):
    one, two = probe.check_hosts(odd(program))
    assert (one.problem, two.problem[: len(problem)]) == ("", problem)
    assert one.rate > 0


def test_probe_reports_an_unknown_name_next_to_other_hosts():
    """A host with an unknown name is reported like a host that refuses to start."""
    one, two, three = probe.check_hosts(odd("", ""))
    assert (one.problem, two.problem) == ("", "local-2 is closed today")
    assert one.rate > 0
    assert three.problem.startswith("odd: local-3: the host '")
    assert "check the name of the host" in three.problem


@pytest.mark.skipif(not shutil.which("ssh"), reason="ssh is not here: apt-get install openssh-client")
def test_probe_reports_each_of_several_unknown_names():
    found = probe.check_hosts(ssh("one.invalid", "two.invalid"))
    for facts, host in zip(found, ("one.invalid", "two.invalid"), strict=True):
        assert facts.problem.startswith(f"ssh: the host {host!r} can't be resolved (")


def test_probe_reports_a_host_that_does_not_connect_in_time():
    _, two = probe.check_hosts(odd("import signal; signal.pause()"), host_timeout=5.0)
    assert two.problem.startswith("local-2 did not connect to 127.0.0.1:")
    assert two.problem.endswith("set address= to another address of this machine")
    assert " within 5 s; " in two.problem


QUITTING = (
    "import json, sys\nfrom flowchan.hosts import probe\nprobe._answer = lambda sock: None\nprobe.main()"
)


def test_probe_reports_a_host_that_exits_during_measurement():
    _, two = probe.check_hosts(odd(QUITTING))
    assert two.problem.startswith("local-2 did not answer during the measurement: ")
    assert two.python == platform.python_version()


def check(*words: str) -> tuple[int, list[str], str]:
    result = CliRunner().invoke(main, ["hosts", "check", *words])
    return result.exit_code, result.stdout.splitlines(), result.stderr


def test_command_prints_one_row_per_host():
    code, lines, errors = check("local:2")
    assert (code, errors) == (0, "")
    assert lines[0].split("  ")[0] == "host"
    rows = [line.split() for line in lines]
    assert [row[0] for row in rows] == ["host", "local-1", "local-2"]
    assert rows[1][1:3] == [platform.python_version(), importlib.metadata.version("flowchan")]
    assert {"ms", "MB/s", "GiB"} <= set(rows[1])


def test_command_names_unusable_hosts_and_fails(monkeypatch):
    monkeypatch.setattr(
        "flowchan.hosts.spec.parse", lambda spec: Spec(odd("raise SystemExit(7)"), 10.0, False)
    )
    code, lines, errors = check("local:2")
    assert code == 1
    assert [line.split()[0] for line in lines] == ["host", "local-1"]
    assert errors == "flowchan: the agent local-2 exited with code 7 without finishing\n"


def test_command_refuses_invalid_hosts(monkeypatch):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    code, lines, errors = check("local:none")
    assert (code, lines) == (2, [])
    assert "hosts must look like local:2, " in errors
    code, lines, errors = check("slurm")
    assert (code, lines) == (2, [])
    assert errors.startswith("flowchan: slurm: this program is not running in a Slurm allocation")


def test_probe_launch_keeps_the_secret_out_of_arguments():
    seen: list[Launch] = []

    class Seeing(Local):
        def start(self, number: int, launch: Launch) -> Any:
            seen.append(launch)
            raise HostError("no")

    probe.check_hosts(Seeing(1))
    launch = json.loads(seen[0].stdin)
    assert len(bytes.fromhex(launch["secret"])) == 32
    assert seen[0].arguments == ("-m", "flowchan.hosts.probe")
