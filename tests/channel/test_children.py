"""Pass an inter-process channel to a child: by inheritance, by pickling, or through another channel."""

from __future__ import annotations

import copy
import multiprocessing
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import forkserver, resource_tracker
from typing import Any

import children
import numpy as np
import pytest
from support.peers import ThreadPeer
from support.waiting import wait_blocked

from flowchan import Channel

METHODS = ["fork", "spawn", "forkserver"]


@pytest.fixture(scope="module", autouse=True)
def helpers_of_multiprocessing() -> Iterator[None]:
    """Start the two server processes of multiprocessing first, so that no test seems to leak them."""
    resource_tracker.ensure_running()
    forkserver.ensure_running()
    yield
    forkserver._forkserver._stop()  # type: ignore[attr-defined]
    resource_tracker._resource_tracker._stop()  # type: ignore[attr-defined]


@pytest.fixture(params=METHODS)
def context(request: pytest.FixtureRequest) -> Any:
    return multiprocessing.get_context(request.param)


def end(process: Any) -> None:
    """Wait until a child exits with code 0, and release it."""
    process.join()
    assert process.exitcode == 0
    process.close()


def test_channel_can_be_an_argument_of_a_new_process(context):
    """Pass the channel by inheritance under fork, and by pickling under spawn and forkserver."""
    requests, replies = Channel(4, across="processes"), Channel(4, across="processes")
    process = context.Process(target=children.echo, args=(requests, replies))
    process.start()
    requests.put_many([1, "two", None])
    requests.close()
    assert list(replies) == [1, "two", None]
    end(process)


def test_channel_reaches_a_child_through_another_channel(context):
    """Send a channel that was created after the child had started."""
    carrier = Channel(4, across="processes")
    process = context.Process(target=children.answer_by_what_arrives, args=(carrier,))
    process.start()
    for number in range(3):
        source, reply = Channel(1, across="processes"), Channel(1, across="processes")
        source.put(number)
        carrier.put((source, reply))
        assert reply.get() == ("answer", number)
    carrier.close()
    end(process)


def test_channel_made_in_a_child_reaches_the_parent(context):
    """Send a channel from the child to its parent."""
    carrier = Channel(4, across="processes")
    process = context.Process(target=children.make_and_send, args=(carrier,))
    process.start()
    source, reply = carrier.get()
    source.put(41)
    assert reply.get() == 42
    end(process)


def test_closing_a_writer_in_a_child_closes_the_channel(context):
    """Check C5 for every start method."""
    ch = Channel(4, across="processes")
    process = context.Process(target=children.write_by_port, args=(ch, [1, 2, 3]))
    process.start()
    assert list(ch) == [1, 2, 3]
    end(process)


def test_parent_wakes_a_waiting_child(context):
    """Check C8 for every start method."""
    ch, result = Channel(4, across="processes"), Channel(4, across="processes")
    process = context.Process(target=children.pass_one, args=(ch, result))
    process.start()
    wait_blocked(ch, readers=1)
    ch.put("woken")
    assert result.get() == "woken"
    end(process)


# a forked child cannot use the forkserver of its parent
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_grandchild_inherits_a_channel(method):
    """Pass a channel to a forked child, and from there to the child's own child."""
    context = multiprocessing.get_context(method)
    requests, replies = Channel(4, across="processes"), Channel(4, across="processes")

    def start_another():
        process = context.Process(target=children.echo, args=(requests, replies))
        process.start()
        process.join()
        os._exit(process.exitcode or 0)

    child = multiprocessing.get_context("fork").Process(target=start_another)
    child.start()
    requests.put("far")
    requests.close()
    assert list(replies) == ["far"]
    end(child)


def test_channel_sent_twice_to_a_process_is_one_object(context):
    """In the child, both arguments must be the same object."""
    ch, result = Channel(1, across="processes"), Channel(1, across="processes")
    process = context.Process(target=children.put_and_take_back, args=(ch, ch, result))
    process.start()
    assert result.get() == "round"
    end(process)


@pytest.mark.parametrize("method", METHODS)
def test_executor_initialiser_receives_a_channel(method):
    """Pass a channel to the executor's initialiser, the usual way to give one object to all workers."""
    requests, replies = Channel(4, across="processes"), Channel(4, across="processes")
    context = multiprocessing.get_context(method)
    requests.put_many([1, 2, 3])
    requests.close()
    with ProcessPoolExecutor(
        1, mp_context=context, initializer=children.echo, initargs=(requests, replies)
    ) as pool:
        assert pool.submit(len, "abc").result() == 3
        assert list(replies) == [1, 2, 3]


def test_os_fork_child_uses_the_channel():
    """Use the channel in a child of ``os.fork``."""
    ch = Channel(4, across="processes")
    pid = os.fork()
    if pid == 0:
        try:
            ch.put("from the child")
        finally:
            os._exit(0)
    assert ch.get() == "from the child"
    os.waitpid(pid, 0)


def test_unpickled_channel_is_the_same_object_in_its_process():
    """While the original channel is alive, unpickling or copying must return that object."""
    ch = Channel(across="processes")
    assert pickle.loads(pickle.dumps(ch)) is ch
    assert copy.copy(ch) is ch
    assert copy.deepcopy(ch) is ch


def test_threads_channel_can_be_neither_pickled_nor_copied():
    """The error must name a transport that supports pickling."""
    ch = Channel(across="threads")
    for action in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="across='processes'"):
            action(ch)


def test_threads_channel_cannot_be_passed_to_another_process():
    """The error must name both transports."""
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=children.echo, args=(Channel(across="threads"), None))
    with pytest.raises((TypeError, RuntimeError), match="threads") as caught:
        process.start()
    assert "processes" in str(caught.value)


@pytest.mark.parametrize("call", ["put", "get", "put_nowait", "get_nowait"])
def test_threads_channel_raises_when_used_in_a_forked_child(call):
    """A call would change only the child's copy. The error must say so and name a suitable transport."""
    ch = Channel(across="threads")
    ch.put("in the parent")
    answer = Channel(across="processes")
    pid = os.fork()
    if pid == 0:
        try:
            getattr(ch, call)(*(["item"] if call.startswith("put") else []))
            answer.put("no error")
        except Exception as error:
            answer.put((type(error).__name__, str(error)))
        finally:
            os._exit(0)
    name, message = answer.get()
    os.waitpid(pid, 0)
    assert name == "ChannelError"
    assert "threads" in message
    assert "processes" in message
    assert ch.get() == "in the parent"


def test_channel_works_after_a_fork_while_a_thread_waits(context):
    """The child can be started at any time, and must be able to use the channel at once."""
    ch, result = Channel(4, across="processes"), Channel(4, across="processes")
    waiting = ThreadPeer(ch.get)
    wait_blocked(ch, readers=1)
    process = context.Process(target=children.pass_one, args=(ch, result))
    process.start()
    wait_blocked(ch, readers=2)
    ch.put_many(["one", "two"])
    assert {waiting.result(), result.get()} == {"one", "two"}
    end(process)


def test_script_that_leaves_channels_open_exits_cleanly(tmp_path):
    """A program with open channels, full channels and waiting daemon threads must exit with code 0."""
    script = tmp_path / "forgets.py"
    script.write_text(
        "import threading\n"
        "from flowchan import Channel\n"
        "channels = [Channel(2, across=across) for across in ('threads', 'processes')]\n"
        "for ch in channels:\n"
        "    ch.put(ch)\n"
        "    threading.Thread(target=lambda: list(ch), daemon=True).start()\n"
        "port = channels[1].writer()\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_c1_early_and_late_processes_map_a_grown_channel(context: Any) -> None:
    requests: Channel[Any] = Channel(30_000, across="processes", max_bytes=256 << 20)
    replies: Channel[int] = Channel(30_000, across="processes")
    processes = [context.Process(target=children.echo_sums, args=(requests, replies))]
    processes[0].start()
    sums = []

    def exchange(item: Any) -> None:
        requests.put(item)
        sums.append(children.sum_of(item))

    exchange(1)
    assert replies.get() == 1  # by now, the child has mapped the channel at its present size
    for size in (1_000, 30_000, 1 << 20, 4 << 20):
        exchange(np.arange(size))
    for number in range(20_000):
        exchange(number)
    processes.append(context.Process(target=children.echo_sums, args=(requests, replies)))
    processes[1].start()
    for size in (2 << 20, 30):
        exchange(np.arange(size))
    requests.close()
    answers = sums[:1]
    # the arrays that the child has kept must be unchanged, although the channel grew
    answers += [replies.get() for _ in range(2 * len(sums) - 1)]
    for process in processes:
        process.join()
        assert process.exitcode == 0
    assert sorted(answers) == sorted(2 * sums)
