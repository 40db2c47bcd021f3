"""Predict the effect of a change to one stage, or suggest a change, from the statistics of a window.

The model is in :mod:`flowchan.run.observe.throughput`. Each prediction has a range, because three facts are
unknown: how much work times vary, whether code releases the interpreter lock, and whether a short window is
representative.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass

from flowchan.declare.operators import OPERATORS
from flowchan.public import public
from flowchan.run.observe.causes import BUSY, SEEN
from flowchan.run.observe.throughput import (
    CORES,
    FIXED,
    LOCK,
    LOOP,
    MOST_EXPONENT,
    Change,
    Model,
    StageWork,
)
from flowchan.run.policy.stats import RunStats, StageStats

NOISE = 0.05
"""Minimum relative error that every range covers."""
CROWDED = 0.5
"""Relative error that a range adds if workers wait for cores all the time. Less waiting adds less."""
WORTH = 1.2
"""Minimum predicted ratio of the new rate to the old one for which a change is suggested."""
LEAST_WINDOW_S, LEAST_ITEMS = 1.0, 20
"""Minimum length of a window in seconds, and minimum number of items in it, for a suggestion."""
ENOUGH = 0.95
"""Share of the largest gain that the suggested number of workers must reach."""


@public
@dataclass(frozen=True, slots=True)
class Prediction:
    """Predicted effect of changing one stage, from :meth:`Run.what_if`.

    All rates count items that leave the graph per second.

    Attributes:
        stage: Name of the stage.
        change: Description of the change, such as "one more worker".
        now: Rate measured in the window.
        predicted: Predicted rate after the change.
        low: Lower end of the likely range of the new rate.
        high: Upper end of that range.
        limited_by: Name of the stage that would limit the run after the change. If no stage would, one of
            "the cores", "the interpreter lock", "the input", "the program", "the memory" and "the items in
            flight".
        why: Explanation of ``limited_by`` in words.

    Example:
        >>> from flowchan import Prediction
        >>> found = Prediction("decode", "one more worker", 50.0, 100.0, 90.0, 105.0, "decode", "")
        >>> found.gain
        2.0
    """

    stage: str
    change: str
    now: float
    predicted: float
    low: float
    high: float
    limited_by: str
    why: str

    @property
    def gain(self) -> float:
        """Return the predicted rate divided by the current rate."""
        return self.predicted / self.now


def predict(stats: RunStats, stage: str, workers: int = 0, faster: float = 1.0) -> Prediction:
    """Predict the effect of a change to one stage.

    Args:
        stats: Statistics of a window.
        stage: Name of a stage for which :func:`missing` returns an empty string.
        workers: Number of workers to add; negative to remove workers.
        faster: Speed-up factor of the stage's work.
    """
    found = _named(stats, stage)
    return _prediction(stats, Model.of(stats), _change(found, workers, faster), found)


def predictions(stats: RunStats) -> list[Prediction]:
    """Predict for each stage the effects of one more worker and of doubled speed.

    The largest effect comes first. Stages that took no items are omitted.
    """
    model = Model.of(stats)
    found = []
    for stage in stats.stages:
        if not missing(stats, model, stage.name):
            if can_grow(stage):
                found.append(_prediction(stats, model, _change(stage, workers=1), stage))
            if OPERATORS[stage.kind].calls is not None:
                found.append(_prediction(stats, model, _change(stage, faster=2.0), stage))
    return sorted(found, key=lambda one: -one.predicted)


def can_grow(stage: StageStats) -> bool:
    """Return whether the stage's number of workers can change."""
    operator = OPERATORS[stage.kind]
    return operator.per_item or (operator.calls == "ports" and stage.workers > 1)


def missing(stats: RunStats, model: Model, stage: str = "") -> str:
    """Return the reason why no prediction is possible, or an empty string if one is."""
    if not end_rate(stats):
        return "no item has left the graph"
    if stage and stage not in model.works:
        return f"stage {stage!r} has processed no item"
    return ""


def end_rate(stats: RunStats) -> float:
    """Return the number of items that leave the graph per second, without failed items."""
    writers = {edge.writer for edge in stats.edges if edge.reader is not None}
    failed = {edge.reader for edge in stats.edges if edge.errors}
    ends = [stage for stage in stats.stages if stage.name not in writers]
    return sum(stage.rate for stage in [one for one in ends if one.name not in failed] or ends)


def _named(stats: RunStats, name: str) -> StageStats:
    return next(stage for stage in stats.stages if stage.name == name)


def _change(stage: StageStats, workers: int = 0, faster: float = 1.0) -> Change:
    return Change({stage.name: stage.workers + workers}, {stage.name: faster})


def _prediction(stats: RunStats, model: Model, change: Change, stage: StageStats) -> Prediction:
    now, gain = end_rate(stats), _gain(model, change)
    gains = [gain, *(_gain(variant, change) for variant in _variants(model))]
    limit = model.limited_by(change=change)
    why = _why(model, change, limit)
    if limit in model.works and model.works[limit].stage.waiting_turn >= SEEN:
        gains.append(min(1.0, gain))
        why += "; its outputs wait for earlier items, so the rate may be lower"
    crowded = _crowded(model)
    noise = NOISE + CROWDED * crowded + 1 / max(1.0, now * stats.window)
    if crowded >= SEEN:
        why += f"; workers wait for a core {100 * crowded:.0f} % of the time, so expect larger errors"
    return Prediction(
        stage.name,
        _described(change, stage),
        now,
        now * gain,
        now * min(gains) * max(0.0, 1 - noise),
        now * max(gains) * (1 + noise),
        limit,
        why,
    )


def _gain(model: Model, change: Change) -> float:
    return model.rate(change=change) / model.rate()


def _variants(model: Model) -> Iterator[Model]:
    """Yield variants of a model, with other assumptions about work times and the interpreter lock."""
    yield dataclasses.replace(model, exponent=MOST_EXPONENT)
    yield dataclasses.replace(model, exponent=model.exponent / 2)
    if model.lock:
        yield dataclasses.replace(model, lock=False)


def _described(change: Change, stage: StageStats) -> str:
    more, faster = change.workers[stage.name] - stage.workers, change.faster[stage.name]
    words = []
    if more:
        number = "one" if abs(more) == 1 else f"{abs(more)}"
        words.append(f"{number} {'more' if more > 0 else 'fewer'} worker{'s' * (abs(more) > 1)}")
    if faster != 1.0:
        words.append("twice as fast" if faster == 2 else f"{faster:g} times as fast")
    return " and ".join(words) or "no change"


def _why(model: Model, change: Change, limit: str) -> str:
    """Explain the resource that sets the smallest bound after a change."""
    if limit in model.works:
        work = model.works[limit]
        workers = change.workers.get(limit, work.stage.workers)
        each = work.each / change.faster.get(limit, 1.0)
        if work.stage.rate_limit is not None and work.stage.rate_limit < workers / max(each, 1e-12):
            return f"its rate={work.stage.rate_limit:g} allows no more items to start"
        owners = "its worker spends" if workers == 1 else f"each of its {workers} workers spends"
        return f"{owners} {_duration(each)} on an item"
    return _REASONS[limit].format(cores=model.cores)


_REASONS = {
    CORES: "the workers would use all {cores} cores",
    LOCK: "threads share the lock; code that releases it would be faster than predicted",
    LOOP: "the loop admits no more items at a time",
    FIXED["input"]: "the program puts no more items",
    FIXED["consumer"]: "the program reads no more results",
    FIXED["memory"]: "the channels have no memory for more items",
}


def _crowded(model: Model) -> float:
    """Return the share of the work time in which workers waited for a CPU core."""
    works = [work.stage.worked for work in model.works.values() if work.local]
    total = sum(one.work for one in works)
    return sum(min(one.ready or 0.0, one.work) for one in works) / total if total else 0.0


def _duration(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.3g} s"
    return f"{1e3 * seconds:.3g} ms" if seconds >= 1e-3 else f"{1e6 * seconds:.3g} µs"


def advice(stats: RunStats) -> str | None:
    """Suggest in one line the change that would help the run most.

    Args:
        stats: Statistics of a window.

    Returns:
        The advice, such as "2 more workers for 'decode' would give 1.8 × the rate". None if the window is too
        short or has too few items, or if no change that the user can make would help much.
    """
    cause = stats.cause
    items = end_rate(stats) * stats.window
    if cause is None or stats.window < LEAST_WINDOW_S or items < LEAST_ITEMS:
        return None
    model = Model.of(stats)
    if cause.kind == "gil":
        threads = [work for work in model.works.values() if work.threads and OPERATORS[work.stage.kind].calls]
        burns = max(threads, key=lambda work: work.stage.cores or 0.0, default=None)
        return None if burns is None else _advised(*_to_process(model, burns, burns.stage.workers))
    work = model.works.get(cause.stage or "")
    if work is None or cause.kind not in ("order", "bottleneck"):
        return None
    if any(decision.stage == work.stage.name for decision in stats.decisions):
        return None  # the run itself chooses this number of workers
    if work.utilisation < BUSY and work.stage.rate:
        return _for_waits(stats, model, work)
    return _for_stage(model, work)


def _for_waits(stats: RunStats, model: Model, work: StageWork) -> str | None:
    """Suggest a change to a stage whose workers often wait for other stages or for earlier items."""
    stage, free = work.stage, dataclasses.replace(model, exponent=MOST_EXPONENT)
    most = free.rate() * work.visits / stage.rate
    if stage.waiting_turn >= SEEN:
        return _advised(f"ordered=False or a larger buffer for {stage.name!r}", most, up_to=True)
    stages = {one.name: one for one in stats.stages}
    for edge in stats.edges:
        if edge.reader is None or stage.name not in (edge.writer, edge.reader):
            continue
        writer, reader = stages[edge.writer], stages[edge.reader]
        if writer.waiting_output >= SEEN and reader.waiting_input >= SEEN:
            side = "before" if edge.reader == stage.name else "after"
            return _advised(f"a larger buffer {side} {stage.name!r}", most, up_to=True)
    return None


def _for_stage(model: Model, work: StageWork) -> str | None:
    """Suggest more workers, or a move to processes, for a stage whose workers are always busy."""
    stage = work.stage
    if not can_grow(stage):
        return None
    most = max(1, stage.workers)  # number of additional workers that doubles the stage
    gains = [_gain(model, Change({stage.name: stage.workers + more})) for more in range(1, most + 1)]
    if work.threads:
        change, gain = _to_process(model, work, stage.workers + 1)
        if gain >= WORTH * gains[0]:
            return _advised(change, gain)
    more = next(number for number, gain in enumerate(gains, 1) if gain - 1 >= ENOUGH * (gains[-1] - 1))
    noun = "worker" if more == 1 else "workers"
    return _advised(f"{more} more {noun} for {stage.name!r}", gains[more - 1])


def _to_process(model: Model, work: StageWork, workers: int) -> tuple[str, float]:
    """Predict the gain from moving the workers of a stage to processes, and describe the change."""
    name = work.stage.name
    gain = _gain(model, Change({name: workers}, on_process=(name,)))
    number = "" if workers == work.stage.workers else f" and workers={workers}"
    return f"on='process'{number} for {name!r}", gain


def _advised(change: str, gain: float, up_to: bool = False) -> str | None:
    if gain < WORTH or not math.isfinite(gain):
        return None
    return f"{change} would give {'up to ' * up_to}{gain:.1f} × the rate"
