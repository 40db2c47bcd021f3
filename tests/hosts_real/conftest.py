"""Servers for these tests, each started once and ended by its process id."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from networks import Networks
from nodes import Nodes
from servers import Servers, free_ports, need, need_root, program
from support.waiting import wait_until

SSHD = """
ListenAddress 127.0.0.1
Port {port}
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/user_key.pub
PidFile none
UsePAM no
StrictModes no
PasswordAuthentication no
KbdInteractiveAuthentication no
"""

CLIENT = """
Host down
    Port {closed}
Host stranger
    UserKnownHostsFile /dev/null
    StrictHostKeyChecking yes
Host wrongkey
    IdentityFile {folder}/other_key
Host * !wrongkey
    IdentityFile {folder}/user_key
Host *
    HostName 127.0.0.1
    Port {port}
    IdentitiesOnly yes
    UserKnownHostsFile {folder}/known
    StrictHostKeyChecking accept-new
    LogLevel ERROR
"""

SLURM = """
ClusterName=flowchan
SlurmctldHost={machine}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
ReturnToService=2
KillWait=2
NodeName=node1 NodeHostname={machine} NodeAddr=127.0.0.1 Port={ports[1]}
NodeName=node2 NodeHostname={machine} NodeAddr=127.0.0.1 Port={ports[2]}
PartitionName=all Nodes=node1,node2 Default=YES State=UP
"""
MUNGE_FILES = ("socket", "key-file", "pid-file", "seed-file", "log-file")


@dataclass(frozen=True)
class Sshd:
    """An sshd on loopback. All host names resolve to it, except ``down``, on which no server listens."""

    servers: Servers

    def log(self) -> str:
        return self.servers.log("sshd")


@pytest.fixture(scope="session")
def sshd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    need("sshd", "ssh", "ssh-keygen", package="openssh-server openssh-client")
    need_root()
    folder = tmp_path_factory.mktemp("sshd")
    for key in ("host_key", "user_key", "other_key"):
        command = (program("ssh-keygen"), "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key))
        subprocess.run(command, check=True)
    port, closed = free_ports(2)
    (folder / "sshd_config").write_text(SSHD.format(port=port, folder=folder))
    (folder / "client_config").write_text(CLIENT.format(port=port, folder=folder, closed=closed))
    with in_front(folder, "ssh", f'exec {program("ssh")} -F {folder}/client_config "$@"'):
        servers = Servers(folder)
        made = not os.path.isdir("/run/sshd")
        os.makedirs("/run/sshd", 0o755, exist_ok=True)  # Debian's sshd needs this folder
        try:
            servers.start("sshd", (program("sshd"), "-D", "-e", "-f", str(folder / "sshd_config")))
            servers.wait_answering("sshd", port)
            yield Sshd(servers)
        finally:
            servers.close()
            if made:
                os.rmdir("/run/sshd")


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """Start a Slurm cluster with two nodes on this machine, and set ``SLURM_CONF`` to it."""
    need("slurmctld", "slurmd", "srun", "salloc", "munged", package="slurm-wlm munge")
    need_root()
    folder = tmp_path_factory.mktemp("slurm")
    (folder / "state").mkdir()
    (folder / "munge.key").write_bytes(os.urandom(1024))
    (folder / "munge.key").chmod(0o600)
    ports = free_ports(3)
    config = SLURM.format(folder=folder, machine=socket.gethostname(), ports=ports)
    (folder / "slurm.conf").write_text(config)
    munge = [f"--{name}={folder}/munge.{name.split('-')[0]}" for name in MUNGE_FILES]
    os.environ["SLURM_CONF"] = str(folder / "slurm.conf")
    with contextlib.closing(Servers(folder)) as servers:
        servers.start("munged", (program("munged"), "--foreground", "--force", *munge))
        wait_until((folder / "munge.socket").exists, what=lambda: servers.log("munged"))
        servers.start("slurmctld", (program("slurmctld"), "-D"))
        servers.wait_answering("slurmctld", ports[0])
        for name, port in zip(("node1", "node2"), ports[1:], strict=True):
            servers.start(name, (program("slurmd"), "-D", "-N", name))
            servers.wait_answering(name, port)
        yield servers
    del os.environ["SLURM_CONF"]


@pytest.fixture
def allocation(cluster: Servers, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Run the test in an allocation of both nodes, and yield the job id."""
    command = ("salloc", "--no-shell", "--nodes=2", "--job-name=flowchan-test")
    report = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stderr
    job = report.split("Granted job allocation")[1].split()[0]
    monkeypatch.setenv("SLURM_JOB_ID", job)
    monkeypatch.setenv("SLURM_JOB_NODELIST", "node[1-2]")
    yield job
    subprocess.run(("scancel", job), check=True)


@pytest.fixture
def networks() -> Iterator[Networks]:
    need("ip", package="iproute2")
    need_root()
    with contextlib.closing(Networks()) as networks:
        yield networks


@pytest.fixture(scope="session")
def nodes() -> Iterator[Nodes]:
    """Start Ray on three nodes, each in its own network namespace."""
    need("ip", package="iproute2")
    need_root()
    pytest.importorskip("ray", reason="Ray is not installed: pip install ray")
    with contextlib.closing(Nodes()) as nodes:
        for name in nodes.names:
            nodes.start(name)
        yield nodes


@contextlib.contextmanager
def in_front(folder: Path, name: str, script: str) -> Iterator[None]:
    """Make programs that run ``name`` find this script instead. The script may run the real program."""
    before = os.environ["PATH"]
    (folder / "bin").mkdir()
    (folder / "bin" / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / "bin" / name).chmod(0o755)
    os.environ["PATH"] = f"{folder}/bin:{before}"
    try:
        yield
    finally:
        os.environ["PATH"] = before
