"""Test agents that the system's ssh starts through an sshd on loopback."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from driver import (
    Driver,
    assert_agents_run_and_report_their_ends,
    assert_the_secret_is_hidden,
    end_of,
)
from support.waiting import wait_until

from flowchan.hosts.providers.provider import Launch
from flowchan.hosts.providers.ssh import ssh

pytestmark = pytest.mark.usefixtures("sshd")


def test_each_host_runs_its_agent_and_reports_its_end():
    with Driver(ssh("gpu1", "root@gpu2", python=sys.executable)) as driver:
        assert driver.address == "127.0.0.1"
        assert_agents_run_and_report_their_ends(driver, sys.executable)


def test_secret_is_absent_from_command_lines_and_environments():
    with Driver(ssh("gpu1", python=sys.executable)) as driver:
        assert_the_secret_is_hidden(driver)


def test_python_path_may_begin_with_a_tilde(tmp_path):
    """The remote shell expands the tilde."""
    home = os.path.expanduser("~")
    name = f".flowchan test {tmp_path.name}"
    os.symlink(sys.executable, f"{home}/{name}")
    try:
        with Driver(ssh("gpu1", python=f"~/{name}")) as driver:
            driver.start(0)
            assert driver.receive()["number"] == 0
    finally:
        os.unlink(f"{home}/{name}")


def test_output_reaches_stderr_with_the_host_name(capfd):
    with Driver(ssh("gpu1", python=sys.executable)) as driver:
        driver.start(0)
        driver.receive()
        driver.order(0, "1")
        end_of(driver.started[0])
    out, err = capfd.readouterr()
    assert out == ""
    assert err == "[gpu1] agent 0 is up\n[gpu1] a last word without an end of line\n"


def test_agent_keeps_running_when_its_ssh_is_killed():
    """After its ssh has ended, an agent runs until its ``peer_timeout`` expires. Here, the driver tells the
    agent to exit."""
    with Driver(ssh("gpu1", python=sys.executable)) as driver:
        one = driver.start(0)
        agent = psutil.Process(driver.receive()["pid"])
        assert len(clients()) == 1
        one.kill()
        wait_until(lambda: clients() == [])
        assert one.ended() is None
        assert agent.is_running()
        driver.order(0, "0")
        wait_until(lambda: not agent.is_running())


def clients() -> list[psutil.Process]:
    """Return the running ssh processes of this test."""
    own = psutil.Process().children()
    return [child for child in own if child.name() == "ssh" and child.status() != psutil.STATUS_ZOMBIE]


def test_lost_ssh_connection_is_not_reported_as_the_agents_end():
    with Driver(ssh("gpu1", python=sys.executable)) as driver:
        one = driver.start(0)
        agent = psutil.Process(driver.receive()["pid"])
        server = next(process for process in agent.parents() if process.name() == "sshd")
        server.send_signal(signal.SIGKILL)
        wait_until(lambda: clients() == [])
        assert one.ended() is None
        assert agent.is_running()
        driver.order(0, "0")
        wait_until(lambda: not agent.is_running())


UNREACHED = {
    "down": "down can't be reached: connect to host 127.0.0.1 port {port}: Connection refused",
    "wrongkey": (
        "wrongkey does not accept a login without a password (root@127.0.0.1: Permission "
        "denied (publickey).); make 'ssh -oBatchMode=yes wrongkey true' work"
    ),
    "stranger": (
        "stranger has an unknown or changed host key (Host key verification failed.); run "
        "'ssh stranger' once to check it"
    ),
}


@pytest.mark.parametrize("host", UNREACHED)
def test_unreachable_host_is_reported_on_one_line(host):
    with Driver(ssh(host, python=sys.executable)) as driver:
        found = subprocess.run(("ssh", "-G", host), capture_output=True, text=True, check=True).stdout
        port = next(line.split()[1] for line in found.splitlines() if line.startswith("port "))
        assert end_of(driver.start(0)) == UNREACHED[host].format(port=port)


def test_error_names_the_missing_python_and_its_host():
    with Driver(ssh("gpu1", python="/nowhere/python")) as driver:
        why = end_of(driver.start(0))
    assert why.startswith("gpu1 has no Python at /nowhere/python (")
    assert why.endswith("not found); set python= to a Python that has flowchan")


def test_error_names_the_host_if_its_python_lacks_flowchan():
    with Driver(ssh("gpu1", python="/usr/bin/python3")) as driver:
        launch = Launch(("-I", "-S", "-m", "flowchan.hosts.agent"), b"{}\n")
        driver.started[0] = one = driver.provider.start(0, launch)
        assert end_of(one) == (
            "the Python at /usr/bin/python3 on gpu1 has no flowchan; set python= to a Python that has "
            "flowchan"
        )


def test_command_checks_hosts_over_ssh():
    spec = f"ssh:gpu1,down,python={sys.executable}"
    command = Path(sys.executable).with_name("flowchan")
    done = subprocess.run((command, "hosts", "check", spec), capture_output=True, text=True)
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["host", "gpu1"]
    assert done.stderr.splitlines()[-1].startswith(
        "flowchan: down can't be reached: connect to host 127.0.0.1"
    )
    assert done.returncode == 1
