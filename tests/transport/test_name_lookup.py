"""Test names that resolve late, never, or to an address that does not answer.

The programs run in a network namespace with its own name server, whose answers take longer than the tests.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from ends import SECRET

LATE = r"'silent.example' can't be resolved \(no answer within 0\.[12]\d* s\)"
NAMESPACE = """
set -e
printf 'nameserver 127.0.0.1\\noptions timeout:30 attempts:5\\n' > resolv.conf
mount --bind resolv.conf /etc/resolv.conf
printf 'hosts: files dns\\n' > nsswitch.conf
mount --bind nsswitch.conf /etc/nsswitch.conf
printf 'fd00::9 two.addresses\\n127.0.0.1 two.addresses\\n' > hosts
mount --bind hosts /etc/hosts
ip link set lo up
ip link add near type veth peer name far
ip link set near up
ip link set far up
ip -6 addr add fd00::1/64 dev near nodad
ip -6 neigh add fd00::9 lladdr 02:00:00:00:00:09 dev near nud permanent
echo ready
exec "$@"
"""

BEGIN = f"""
import os, signal, socket, threading
from flowchan import HostError, collective
from flowchan.transport import connect, listen
silent = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
silent.bind(("127.0.0.1", 53))  # a name server that never answers
secret = {SECRET!r}
"""

CONNECT = """
try:
    connect("silent.example:4711", secret, timeout=0.2)
except HostError as error:
    print(error)
"""

GROUP = """
for rank in (0, 1, None):
    try:
        collective.group(rank=rank, size=2, at="silent.example:4711", secret=secret, timeout=0.2)
    except OSError as error:
        print(error)
"""

SHRINK = """
from concurrent.futures import ThreadPoolExecutor
from flowchan.collective.rendezvous.address import meet_at
with open("hosts", "a") as file:
    file.write("127.0.0.1 silent.example\\n")
with ThreadPoolExecutor(2) as pool:
    form = lambda rank: meet_at("silent.example:4711", secret, rank, 2, 60.0, host=str(rank))
    survivor, victim = pool.map(form, range(2))
victim._abandon()
open("hosts", "w").close()
try:
    survivor.shrink(timeout=0.2)
except TimeoutError as error:
    print(error)
survivor._abandon()
"""

FOLDER = """
from pathlib import Path
from flowchan.collective.rendezvous.folder import meet_in
try:
    meet_in(Path("meeting"), "x", "silent.example", 0, 2, 0.2, "")
except OSError as error:
    print(error)
print(os.path.exists("meeting"))
"""

INBOX = """
from flowchan.hosts.pool_channels import Reach
try:
    Reach("silent.example", False, 0.2).channel(1)
except OSError as error:
    print(error)
"""

AGENT = """
from flowchan.hosts.agent import Agent, Orders
os.dup2(1, 2)
Agent(Orders(secret, "silent.example:4711", 0, 1, 0.2, "graph", False, {}))
"""

MEMBERSHIP = """
import select, sys
from flowchan.collective.rendezvous.membership import Membership
from flowchan.transport.listener import AuthenticatedListener
from flowchan.transport.rendezvous import Coordinator
from flowchan.transport.tcp import listen as listen_at
with open("hosts", "a") as file:
    file.write("127.0.0.1 driver.example\\n")
def drive():
    coordinator = Coordinator(1)
    coordinator.come(0, listener.accept(60.0)[0])
    while coordinator.sockets:
        select.select(list(coordinator.sockets.values()), [], [])
        coordinator.receive(0)
def note(event, args):
    if event == "socket.getaddrinfo" and args[0] == "driver.example":
        print("lookup by", threading.current_thread().name)
with listen_at("127.0.0.1:0") as first, AuthenticatedListener(first, secret, {}, tls=TLS) as listener:
    at = "driver.example:" + first.address.partition(":")[2]
    driver = threading.Thread(target=drive)
    driver.start()
    sys.addaudithook(note)
    membership = Membership(0, 0, 1, "group", "host").reached(at, secret, TLS)
    print("member", membership.__enter__().rank)
    membership.close()
    driver.join()
"""

CTRL_C = """
def interrupt():
    silent.recv(512)
    os.kill(os.getpid(), signal.SIGINT)
threading.Thread(target=interrupt).start()
try:
    listen("silent.example:4711", secret)
except KeyboardInterrupt:
    print("interrupted")
"""

TWO_ADDRESSES = """
print(*(one[4][0] for one in socket.getaddrinfo("two.addresses", 1, type=socket.SOCK_STREAM)))
with listen("127.0.0.1:0", secret) as listener:
    server = threading.Thread(target=lambda: listener.accept().close())
    server.start()
    connect("two.addresses:" + listener.address.partition(":")[2], secret, timeout=60).close()
    server.join()
"""


def printed(program: str, folder: Path, code: int = 0) -> list[str]:
    """Return the lines that a program prints in the namespace. The program must end with this exit code."""
    if not (shutil.which("unshare") and shutil.which("ip")):
        pytest.skip("unshare or ip is not installed: apt-get install util-linux iproute2")
    namespace = ("unshare", "--user", "--map-root-user", "--net", "--mount", "sh", "-c", NAMESPACE, "sh")
    done = subprocess.run(
        [*namespace, sys.executable, "-c", BEGIN + program],
        cwd=folder, capture_output=True, text=True, check=False, timeout=100,
    )  # fmt: skip
    if not done.stdout.startswith("ready"):
        pytest.skip(f"this system does not allow network namespaces: {done.stderr.strip()}")
    assert done.returncode == code, done.stderr
    return done.stdout.splitlines()[1:]


def test_connect_ends_in_time_if_the_name_server_is_silent(tmp_path: Path) -> None:
    (line,) = printed(CONNECT, tmp_path)
    assert re.search(LATE, line)


def test_group_ends_in_time_if_the_name_server_is_silent(tmp_path: Path) -> None:
    lines = printed(GROUP, tmp_path)
    assert len(lines) == 3
    assert all(re.search(LATE, line) for line in lines)


def test_shrink_ends_in_time_if_the_name_server_is_silent(tmp_path: Path) -> None:
    (line,) = printed(SHRINK, tmp_path)
    assert line.startswith("shrink of ")
    assert re.search(LATE, line)


def test_folder_meeting_ends_in_time_without_a_name_server(tmp_path: Path) -> None:
    line, folder_exists = printed(FOLDER, tmp_path)
    assert re.search(LATE, line)
    assert folder_exists == "False"


@pytest.mark.skipif(not importlib.util.find_spec("torch"), reason="torch is not installed: pip install torch")
def test_node_inbox_ends_in_time_without_a_name_server(tmp_path: Path) -> None:
    (line,) = printed(INBOX, tmp_path)
    assert re.search(LATE, line)


def test_agent_ends_in_time_if_the_name_server_is_silent(tmp_path: Path) -> None:
    (line,) = printed(AGENT, tmp_path, code=1)
    assert line.startswith("flowchan agent 1: can't listen for other agents: ")
    assert re.search(LATE, line)


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
def test_membership_looks_up_the_name_of_the_driver_once(tmp_path: Path, tls: bool) -> None:
    """The main thread only checks whether the name is an IP address."""
    *lookups, member = printed(MEMBERSHIP.replace("TLS", str(tls)), tmp_path)
    assert lookups == ["lookup by MainThread", "lookup by lookup of driver.example"]
    assert member == "member 0"


def test_ctrl_c_interrupts_the_lookup_of_a_name(tmp_path: Path) -> None:
    assert printed(CTRL_C, tmp_path) == ["interrupted"]


def test_connect_reaches_the_second_address_if_the_first_is_silent(tmp_path: Path) -> None:
    assert printed(TWO_ADDRESSES, tmp_path) == ["fd00::9 127.0.0.1"]
