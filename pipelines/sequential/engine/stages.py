"""Declare the graph of a pipe's workers: a stage per worker, and channels between neighbours.

    commands ──> [parts 0] ──> [parts 1] ──> … ──> [parts n]     activations
                     │    <──────   │   <──── … <────   │        gradients
                     └───────────┬──┴───────────────────┘
                              answers

In a ring, the last worker also sends activations to the first, and the first also sends gradients to the
last.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from flowchan import Feedback, Graph, In, Input, Out, Stream
from flowchan.declare.placements import Placement
from flowchan.pipelines.sequential.engine.graph_worker import GraphWorker
from flowchan.pipelines.sequential.engine.training_worker import TrainingWorker
from flowchan.pipelines.sequential.engine.worker_messages import Assignment


def declare(
    graph: Graph, jobs: Sequence[Assignment], on: Placement, chunks: int
) -> tuple[list[Input[Any]], list[Stream[Any]]]:
    """Declare the workers for ``jobs`` in ``graph``.

    Return the command inputs by worker, and one or two streams of answers. The first stream comes from the
    worker with the last part, the second from all other workers.
    """
    size = len(jobs)
    ring = jobs[0].owners.ring
    # The channels have room for all messages of a step. No worker ever waits for room, so no schedule can
    # deadlock.
    capacity = 2 * chunks * max(len(job.parts) for job in jobs) + 8
    commands = [graph.input(f"commands {number}", capacity) for number in range(size)]
    round_about = graph.feedback("activations of the last worker") if ring else None
    onward: Stream[Any] | None = round_about
    gradients: list[Feedback[Any]] = []
    backs: list[Stream[Any]] = []
    answers: list[Stream[Any]] = []
    for job in jobs:
        inputs = [commands[job.worker], *([onward] if onward is not None else [])]
        if ring or job.worker < size - 1:
            gradients.append(graph.feedback(f"gradients for {job.name}"))
            inputs.append(gradients[-1])
        function = _FUNCTIONS[onward is not None, ring or job.worker < size - 1]
        outs = graph.stage(function, *inputs, name=job.name, on=on, capacity=capacity, job=job)
        named = {stream.port: stream for stream in (outs if isinstance(outs, tuple) else (outs,))}
        answers.append(named["answers"])
        onward = named.get("onward")
        if "back" in named:
            backs.append(named["back"])
        graph._drawn[job.name] = "\n".join(part.drawn for part in job.parts)
    if ring:
        assert round_about is not None
        assert onward is not None
        round_about.feed(onward)
        backs = [*backs[1:], backs[0]]
    for feedback, back in zip(gradients, backs, strict=True):
        feedback.feed(back)
    streams = [answers.pop(jobs[0].owners.of[-1])]
    if answers:
        streams.append(graph.merge(*answers, name="answers") if len(answers) > 1 else answers[0])
    graph._drawn |= dict.fromkeys([*(f"commands {number}" for number in range(size)), "answers", "results"])
    return commands, streams


def _work(job: Assignment, commands: In[Any], answers: Out[Any], **neighbours: Any) -> None:
    (TrainingWorker if job.trains else GraphWorker)(job, commands, answers, **neighbours).run()


def alone(commands: In[Any], answers: Out[Any], job: Assignment) -> None:
    """Run the worker of a graph that has only one worker."""
    _work(job, commands, answers)


def first(commands: In[Any], backward: In[Any], answers: Out[Any], onward: Out[Any], job: Assignment) -> None:
    """Run the worker with the first part."""
    _work(job, commands, answers, backward=backward, onward=onward)


def middle(
    commands: In[Any],
    forward: In[Any],
    backward: In[Any],
    answers: Out[Any],
    onward: Out[Any],
    back: Out[Any],
    job: Assignment,
) -> None:
    """Run a worker with neighbours on both sides. In a ring, every worker has two neighbours."""
    _work(job, commands, answers, forward=forward, backward=backward, onward=onward, back=back)


def last(commands: In[Any], forward: In[Any], answers: Out[Any], back: Out[Any], job: Assignment) -> None:
    """Run the worker with the last part."""
    _work(job, commands, answers, forward=forward, back=back)


_FUNCTIONS: dict[tuple[bool, bool], Callable[..., None]] = {
    (False, False): alone,
    (False, True): first,
    (True, True): middle,
    (True, False): last,
}
"""Stage functions, keyed by whether there is a previous worker and whether there is a next worker."""
