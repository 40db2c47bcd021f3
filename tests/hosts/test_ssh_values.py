"""Test ssh providers that have not contacted a host: their values, their command, and the driver's
address."""

from __future__ import annotations

import pickle
import subprocess

import pytest

from flowchan.errors import HostError
from flowchan.hosts.providers.output import ProcessOutput
from flowchan.hosts.providers.shell import around, as_text, explainer
from flowchan.hosts.providers.ssh import ssh
from flowchan.transport import addresses


def test_provider_is_compared_and_pickled_by_value():
    given = ssh("gpu1", "user@gpu2", python="~/venv/bin/python")
    assert given.hosts == ("gpu1", "user@gpu2")
    assert given == ssh("gpu1", "user@gpu2", python="~/venv/bin/python") != ssh("gpu1")
    assert pickle.loads(pickle.dumps(given)) == given
    assert hash(given) == hash(pickle.loads(pickle.dumps(given)))
    assert repr(given) == "ssh('gpu1', 'user@gpu2', python='~/venv/bin/python')"
    assert repr(ssh("gpu1", address="10.0.0.1")) == "ssh('gpu1', address='10.0.0.1')"


@pytest.mark.parametrize(
    ("hosts", "error", "message"),
    [
        ((), ValueError, "ssh: hosts must contain at least one host"),
        (
            ("-oProxyCommand=reboot",),
            ValueError,
            "ssh: a host must be a name, an address or user@name, got '-oProxy",
        ),
        (("a b",), ValueError, "got 'a b'"),
        (("",), ValueError, "ssh: a host must not be empty"),
        ((1,), TypeError, "ssh: a host must be a string, got 1"),
        (("gpu1", "gpu2", "gpu1"), ValueError, "ssh: hosts must be different, got 'gpu1' twice"),
    ],
)
def test_invalid_host_is_refused(hosts, error, message):
    with pytest.raises(error, match=message):
        ssh(*hosts)


@pytest.mark.parametrize(
    "word",
    ["python3", "/opt/my venv/bin/python", "it's", "$HOME", "", "~x y/python", "a~/b", "`id`", "~/a b"],
)
def test_shell_parses_the_command_as_intended(word):
    """Words are quoted, and only a leading ``~/`` is left to the shell."""
    read = subprocess.run(
        ("sh", "-c", f"printf %s {as_text((word,))}"),
        capture_output=True,
        text=True,
        env={"HOME": "/home/me"},
    ).stdout
    assert read == (f"/home/me{word[1:]}" if word.startswith("~/") else word)


def test_wrapper_script_reports_the_agents_exit_code():
    done = subprocess.run(around("sh", ("-c", "printf hello; kill -9 $$")), capture_output=True, text=True)
    assert done.stdout == "flowchan-agent started\nhelloflowchan-agent ended 137\n"


ENDS = [
    ((), ("started", "ended 137"), "the agent gpu1 was killed by SIGKILL"),
    ((), ("started", "ended 3"), "the agent gpu1 exited with code 3 without finishing"),
    (
        ("sh: 1: nopy: not found",),
        ("started", "ended 127"),
        "gpu1 has no Python at nopy (sh: 1: nopy: not found); get one",
    ),
    (
        ("No module named 'flowchan'",),
        ("started", "ended 1"),
        "the Python at nopy on gpu1 has no flowchan; get one",
    ),
    (
        ("Traceback (most recent call last):", "OSError: [Errno 28] No space left on device", ""),
        ("started", "ended 1"),
        "the agent gpu1 exited with code 1 without finishing (OSError: [Errno 28] No space left on device)",
    ),
    (("boo",), (), "not reached"),
    (("Connection closed",), ("started",), None),
    ((), ("started", "ended "), None),
]


@pytest.mark.parametrize(("lines", "marks", "why"), ENDS)
def test_agent_end_is_reported_only_if_the_wrapper_reported_it(lines, marks, why):
    """The exit of ssh does not show that the agent exited, unless the wrapper script has reported that."""
    message = explainer("gpu1", "nopy", "get one", lambda code, output: "not reached")(
        255, ProcessOutput(lines, marks)
    )
    assert message is None if why is None else message is not None and message.startswith(why)


ROUTES = {"here": "127.0.0.1", "six": "::1", "near": "10.0.0.1", "near2": "10.0.0.1", "far": "192.168.0.9"}


@pytest.fixture
def routes(monkeypatch: pytest.MonkeyPatch) -> None:
    def route_to(peer: str) -> str:
        if peer not in ROUTES:
            raise OSError(-2, "Name or service not known")
        return ROUTES[peer]

    monkeypatch.setattr(addresses, "route_to", route_to)


def towards(*hosts: str) -> str:
    return addresses.address_towards("ssh", {host: host for host in hosts})


@pytest.mark.usefixtures("routes")
def test_driver_listens_on_an_address_that_all_hosts_can_reach():
    """A host on this machine can reach all of its addresses."""
    assert towards("here") == "127.0.0.1"
    assert towards("six") == "::1"
    assert towards("here", "near", "near2") == "10.0.0.1"


@pytest.mark.usefixtures("routes")
def test_error_for_missing_common_address_names_the_remedy():
    with pytest.raises(HostError, match=r"near from 10.0.0.1, far from 192.168.0.9.*address=") as raised:
        towards("near", "here", "far")
    assert raised.value.host == ""
    with pytest.raises(
        HostError,
        match=r"ssh: can't find an address of this machine that lost .*not known.*; set address=",
    ):
        towards("near", "lost")


def test_route_to_loopback_is_loopback():
    assert addresses.route_to("127.0.0.1") == "127.0.0.1"
    assert addresses.address_towards("ssh", {"x": "localhost"}) in ("127.0.0.1", "::1")


def test_given_address_is_used():
    assert ssh("no.such.host", address="10.1.2.3").listen_at() == "10.1.2.3"


def test_host_error_survives_pickling():
    error = pickle.loads(pickle.dumps(HostError("gpu1: no", "gpu1")))
    assert (str(error), error.host) == ("gpu1: no", "gpu1")
