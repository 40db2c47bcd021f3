"""The servers that these tests need, each started once and ended by its process ids."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from servers import Servers, free_port, need, need_root, program

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


@dataclass(frozen=True)
class Sshd:
    """An sshd on loopback that all host names lead to, but for ``down``, which nobody answers."""

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
    port = free_port()
    (folder / "sshd_config").write_text(SSHD.format(port=port, folder=folder))
    (folder / "client_config").write_text(CLIENT.format(port=port, folder=folder, closed=free_port()))
    with in_front(folder, "ssh", f'exec {program("ssh")} -F {folder}/client_config "$@"'):
        servers = Servers(folder)
        made = not os.path.isdir("/run/sshd")
        os.makedirs("/run/sshd", 0o755, exist_ok=True)  # Debian's sshd wants it
        try:
            servers.start("sshd", (program("sshd"), "-D", "-e", "-f", str(folder / "sshd_config")))
            servers.wait_answering("sshd", port)
            yield Sshd(servers)
        finally:
            servers.close()
            if made:
                os.rmdir("/run/sshd")


@contextlib.contextmanager
def in_front(folder: Path, name: str, script: str) -> Iterator[None]:
    """Programs that ask for ``name`` find this script, which may go on to the real one."""
    before = os.environ["PATH"]
    (folder / "bin").mkdir()
    (folder / "bin" / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / "bin" / name).chmod(0o755)
    os.environ["PATH"] = f"{folder}/bin:{before}"
    try:
        yield
    finally:
        os.environ["PATH"] = before
