"""Three network namespaces on this machine, joined by a bridge in the first namespace; no route leads out
of them."""

from __future__ import annotations

import itertools
import os
import subprocess

HEAD = "10.77.0.1"
_count = itertools.count()


class Networks:
    """Network namespaces: drivers run in the first of ``names``, which has a virtual cable to each of the
    others."""

    def __init__(self) -> None:
        once = f"flowchan-{os.getpid()}-{next(_count)}"
        self.names = tuple(f"{once}-{which}" for which in ("head", "one", "two"))
        try:
            self._make()
        except BaseException:
            self.close()
            raise

    def _make(self) -> None:
        head = self.names[0]
        for name in self.names:
            ip(f"netns add {name}")
            ip(f"-n {name} link set lo up")
        ip(f"-n {head} link add bridge type bridge")
        ip(f"-n {head} addr add {HEAD}/24 dev bridge")
        ip(f"-n {head} link set bridge up")
        for number, name in enumerate(self.names[1:], 2):
            ip(f"link add cable netns {name} type veth peer name cable{number} netns {head}")
            ip(f"-n {head} link set cable{number} master bridge up")
            ip(f"-n {name} addr add {self.address(name)}/24 dev cable")
            ip(f"-n {name} link set cable up")

    def slow_link(self, first: str, second: str, rate: str) -> None:
        """Route the traffic between two namespaces through a new router that limits it to ``rate``."""
        router = f"{first}-router"
        self.names += (router,)
        ip(f"netns add {router}")
        inside(router, "sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward")
        for number, (name, other) in enumerate([(first, second), (second, first)]):
            ours, gate = f"10.78.{number}.2", f"10.78.{number}.1"
            ip(f"link add way netns {name} type veth peer name way{number} netns {router}")
            ip(f"-n {name} addr add {ours}/24 dev way")
            ip(f"-n {name} link set way up")
            ip(f"-n {name} route add {self.address(other)} via {gate} src {self.address(name)}")
            ip(f"-n {router} addr add {gate}/24 dev way{number}")
            ip(f"-n {router} link set way{number} up")
            ip(f"-n {router} route add {self.address(name)} via {ours}")
            shaping = f"tc qdisc add dev way{number} root tbf rate {rate} burst 64kbit latency 400ms"
            inside(router, *shaping.split())

    def address(self, name: str) -> str:
        return f"10.77.0.{self.names.index(name) + 1}"

    def close(self) -> None:
        for name in self.names:
            subprocess.run(("ip", "netns", "del", name), stderr=subprocess.DEVNULL)


def inside(name: str, *command: str) -> None:
    subprocess.run(("ip", "netns", "exec", name, *command), check=True)


def ip(command: str) -> None:
    subprocess.run(("ip", *command.split()), check=True)
