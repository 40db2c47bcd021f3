"""Models of the protocols. Spin searches them exhaustively, with a death between any two steps.

The models cover the ring, its leases and waiting, the streams between hosts, and outputs that stay on their
host. Other models cover requests to the owner of a channel, and the rounds of a group. The top of each model
states its scope, and for each step the source line that it models. The search must also find planted faults
(``PLANT_…``) and weaknesses of the source (``SOURCE_…``), to show that every property can fail.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
SOURCE = HERE.parents[1] / "flowchan"
MEGABYTES = 1900

needs_spin = pytest.mark.skipif(
    not (shutil.which("spin") and shutil.which("gcc")),
    reason="spin or gcc is not installed: as root, .ci/tools.sh, or apt-get install spin gcc",
)

CALM = "SPURIOUS=0 QUITS=0"

# Each model, with the parameters of the fastest full search. Unchanged models give the same results, so only
# `make soak` runs the other searches.
WHOLE = [
    ("ring", "ITEMS=1 DEATHS=1"),
    ("lease", "ITEMS=1 OUTPUTS=2 DEATHS=2 WORKERS=1"),
    ("gate", f"ITEMS=1 {CALM} RANKS"),
    ("line", "ITEMS=2 PORTS=2 OUTPUTS=1"),
    ("fetch", "ITEMS=1 DEATHS=1 FAILS=1"),
    ("asking", "GETTERS=1 DEATHS=0"),
    ("group", "DEATHS=2 STOPS=1"),
]
# Each model, with one parameter raised just enough to find every planted fault below.
LONGEST = [
    ("group", "DEATHS=1 CLOSES=1"),
    ("ring", "ITEMS=2 DEATHS=1"),
    ("lease", "ITEMS=1 OUTPUTS=2 DEATHS=2 CAP=2"),
    ("gate", "ITEMS=1 SPURIOUS=0 GATHER"),
    ("line", "ITEMS=2 RECALLS=1"),
    ("group", "DIRECT DEATHS=1 STOPS=1 OPERATIONS=1"),
    ("ring", "ITEMS=1 DEATHS=3"),
    ("ring", "ITEMS=2 DEATHS=1 CAP=2"),
    ("lease", "ITEMS=1 OUTPUTS=2 DEATHS=3"),
    ("lease", "ITEMS=2 OUTPUTS=2 DEATHS=1"),
    ("gate", "ITEMS=1 RANKS"),
    ("gate", f"ITEMS=2 CAP=2 {CALM} LAZY=2 RANKS"),
    ("gate", f"ITEMS=1 {CALM} DEATHS=1"),
    ("line", "ITEMS=3 BREAKS=2 HOSTS=2 WORKERS=2"),
    ("line", "ITEMS=3 BREAKS=1 HOSTS=2 PORTS=2"),
    ("line", "ITEMS=3 BREAKS=2 HOSTS=2 WINDOW=1"),
    ("line", "ITEMS=2 LINES=2 OUTPUTS=1"),
    ("line", "ITEMS=2 LINES=2 OUTPUTS=1 WORKERS=0 RECALLS=1"),
    ("line", "ITEMS=3 BREAKS=2 RECALLS=2 OUTPUTS=1"),
    ("fetch", "ITEMS=1 DEATHS=2 FAILS=1"),
    ("fetch", "ITEMS=2 DEATHS=1 FAILS=1"),
    ("fetch", "ITEMS=1 OUTPUTS=2 DEATHS=2"),
    ("asking", "GETTERS=1"),
    ("asking", "GETTERS=1 CANCELS=0 CHILD"),
    ("asking", "GETTERS=1 CANCELS=2 DEATHS=0 CHILD"),
    ("asking", "ITEMS=1 CANCELS=0"),
    ("asking", "ITEMS=3 GETTERS=1 DEATHS=0"),
    ("group", "DEATHS=2 MEMBERS=4 OPERATIONS=1"),
    ("group", "DEATHS=2 ROUNDS=3"),
    ("group", "DIRECT DEATHS=2 STOPS=1"),
]

FAULTS = [
    # every operation happens completely or not at all, in one place, once
    ("ring", "ITEMS=1 DEATHS=1", "PLANT_ignore"),
    ("ring", "ITEMS=1 DEATHS=1", "PLANT_late"),
    ("ring", "ITEMS=1 DEATHS=1", "PLANT_early"),
    ("ring", "ITEMS=1 DEATHS=1", "PLANT_relative"),
    ("ring", "ITEMS=1 DEATHS=1", "PLANT_two_changes"),
    # a dead process does not block others
    ("ring", "ITEMS=1 DEATHS=1", "PLANT_inconsistent"),
    ("ring", "ITEMS=1 DEATHS=1", "PLANT_not_robust"),
    ("ring", "ITEMS=1 DEATHS=1", "PLANT_close_apart"),
    # drained is final
    ("ring", "ITEMS=1 DEATHS=1", "PLANT_end_leased"),
    ("lease", "DEATHS=1", "PLANT_end_leased"),
    ("gate", f"ITEMS=1 {CALM} DEATHS=1", "PLANT_end_leased"),
    # each output is put exactly once
    ("lease", "DEATHS=1", "PLANT_forget"),
    ("lease", "DEATHS=1", "PLANT_hasty"),
    ("lease", "DEATHS=1", "PLANT_apart"),
    ("lease", "DEATHS=1", "PLANT_finish"),
    ("lease", "DEATHS=1", "PLANT_any_resume"),
    ("lease", "DEATHS=2", "PLANT_no_inherit"),
    ("lease", "DEATHS=1 WORKERS=1", "PLANT_open_late"),
    # no waiter sleeps while an item is available, and every sleep ends
    ("gate", "ITEMS=1", "PLANT_no_wake"),
    ("gate", "ITEMS=1", "PLANT_old_seq"),
    ("gate", "ITEMS=1", "PLANT_no_tell_end"),
    ("gate", "ITEMS=1", "PLANT_close_wakes_one"),
    ("gate", "ITEMS=1", "PLANT_no_pass_on"),
    ("gate", f"ITEMS=2 CAP=2 {CALM}", "PLANT_no_next"),
    ("gate", f"ITEMS=1 {CALM} DEATHS=1", "PLANT_no_slices"),
    ("gate", "ITEMS=1", "SOURCE_QUEUE_CLOSED"),
    ("gate", "ITEMS=1 GATHER", "SOURCE_END_OWN"),
    # each output is put exactly once, despite broken connections and dead hosts
    ("line", "ITEMS=2", "PLANT_custody_on_got"),
    ("line", "ITEMS=2", "PLANT_say_first"),
    ("line", "ITEMS=2", "PLANT_no_fence"),
    ("line", "ITEMS=2", "PLANT_done_early"),
    ("line", "ITEMS=2 PORTS=2", "PLANT_put_ahead"),
    ("line", "ITEMS=2 PORTS=2", "PLANT_by_port"),
    ("line", "ITEMS=2", "PLANT_output_first"),
    ("line", "ITEMS=2", "PLANT_end_ahead"),
    ("line", "ITEMS=2", "PLANT_forget"),
    ("line", "ITEMS=2 HOSTS=2", "PLANT_no_inherit"),
    ("line", "ITEMS=2", "PLANT_no_resend"),
    ("line", "ITEMS=2", "PLANT_state_lost"),
    ("line", "ITEMS=2", "PLANT_end_lost"),
    ("line", "ITEMS=2 RECALLS=1", "PLANT_recall_lost"),
    ("line", "ITEMS=2 RECALLS=1", "PLANT_recall_begun"),
    ("line", "ITEMS=2 RECALLS=1", "PLANT_stale_answer"),
    ("line", "ITEMS=2 RECALLS=1", "PLANT_send_on"),
    # each output that stays on its host is read exactly once, although hosts die
    ("fetch", "ITEMS=1 DEATHS=1", "PLANT_no_hold"),
    ("fetch", "ITEMS=1 OUTPUTS=2 DEATHS=1", "PLANT_put_replays"),
    ("fetch", "ITEMS=1 OUTPUTS=2 DEATHS=1", "PLANT_skip_only"),
    ("fetch", "ITEMS=1 OUTPUTS=2 DEATHS=1", "PLANT_replace_any"),
    ("fetch", "ITEMS=1 DEATHS=1", "PLANT_no_moves"),
    ("fetch", "ITEMS=1 FAILS=1 DEATHS=0", "PLANT_no_pull"),
    # each request is answered once, and a channel exists while a process or an item holds it
    ("asking", "GETTERS=1 DEATHS=0", "PLANT_forget"),
    ("asking", "GETTERS=1 DEATHS=0", "PLANT_cancel_taken"),
    ("asking", "GETTERS=1 DEATHS=0", "PLANT_drained_at_once"),
    ("asking", "GETTERS=1", "PLANT_deaf"),
    ("asking", "GETTERS=1", "PLANT_post_late"),
    ("asking", "GETTERS=1", "PLANT_task_lives"),
    ("asking", "GETTERS=1", "PLANT_open_kept"),
    ("asking", "GETTERS=1 DEATHS=0", "PLANT_one_drop"),
    ("asking", "GETTERS=1 DEATHS=0", "PLANT_come_first"),
    ("asking", "GETTERS=1 DEATHS=0", "PLANT_not_sent"),
    ("asking", "GETTERS=1 CANCELS=0 CHILD", "PLANT_not_awaited"),
    # all survivors in a group complete an operation or none does, and none reads overwritten data
    ("group", "DEATHS=0", "PLANT_one_cell"),
    ("group", "DEATHS=0", "PLANT_early"),
    ("group", "DEATHS=1", "PLANT_no_second_look"),
    ("group", "DEATHS=0", "PLANT_any_number"),
    ("group", "DEATHS=1", "PLANT_goes_on"),
    ("group", "DEATHS=0 STOPS=1", "PLANT_silent"),
    ("group", "DEATHS=0 CLOSES=1", "PLANT_at_once"),
    ("group", "DIRECT DEATHS=0 STOPS=1 OPERATIONS=1", "PLANT_trusts"),
    ("group", "DIRECT DEATHS=0 OPERATIONS=1", "PLANT_returns"),
]
FAR_FAULT = ("gate", f"ITEMS=2 {CALM}", "PLANT_wake_one")  # takes millions of states to find
AT_ONCE = list({fault[0]: fault for fault in reversed(FAULTS)}.values())
"""The first fault of each model. Unchanged models contain the same faults, so only make soak searches for the
others."""


def long(search: tuple[str, ...]) -> Any:
    """Mark a search that only make soak runs."""
    return pytest.param(*search, marks=pytest.mark.long)


def run(command: list[str], folder: Path) -> str:
    """Return the output of a command, which must succeed."""
    done = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout
    return done.stdout


def search(model: str, defines: str, folder: Path, optimise: str) -> tuple[int, int, str]:
    """Search a model, and return the number of errors, the number of states, and the output.

    The search stops at the first error.
    """
    shutil.copy(HERE / f"{model}.pml", folder)
    run(["spin", "-a", *(f"-D{define}" for define in defines.split()), f"{model}.pml"], folder)
    compressed = ["-DCOLLAPSE"] if model == "gate" else []
    limits = ["-DSAFETY", *compressed, "-DVECTORSZ=2048", f"-DMEMLIM={MEGABYTES}"]
    run(["gcc", optimise, "-w", *limits, "-o", "pan", "pan.c"], folder)
    printed = run(["./pan", "-m20000", "-w22"], folder)
    errors, states = re.search(r"errors: (\d+)", printed), re.search(r"(\d+) states, stored", printed)
    assert errors, printed
    assert states, printed
    return int(errors[1]), int(states[1]), printed


@needs_spin
@pytest.mark.parametrize(("model", "defines"), [*WHOLE, *map(long, LONGEST)])
def test_protocol_model_holds_in_an_exhaustive_search(model: str, defines: str, tmp_path: Path) -> None:
    # optimising would take longer than a short search
    errors, states, printed = search(
        model, defines, tmp_path, "-O1" if (model, defines) in LONGEST else "-O0"
    )
    assert errors == 0, printed
    for cut_short in ("not completed", "max search depth too small", "MEMLIM"):
        assert cut_short not in printed, printed
    print(f"{model} {defines}: {states:,} states, errors: 0")


@needs_spin
@pytest.mark.parametrize(
    ("model", "defines", "fault"),
    [*AT_ONCE, *(long(fault) for fault in [*FAULTS, FAR_FAULT] if fault not in AT_ONCE)],
)
def test_model_checker_finds_each_planted_fault(model: str, defines: str, fault: str, tmp_path: Path) -> None:
    assert fault in (HERE / f"{model}.pml").read_text(), "no such fault"
    far = fault in ("PLANT_wake_one", "PLANT_no_pass_on")
    errors, states, printed = search(model, f"{defines} {fault}", tmp_path, "-O1" if far else "-O0")
    assert errors == 1, printed
    (said,) = re.findall(r"^pan:1: (.*)", printed, re.M)
    assert said.startswith(("invalid end state", "assertion violated")), printed
    print(f"{model} {defines} {fault}: {said}, after {states:,} states")


def test_every_planted_fault_is_tried() -> None:
    tried = {(model, fault) for model, _, fault in [*FAULTS, FAR_FAULT]}
    there = {
        (path.stem, fault)
        for path in HERE.glob("*.pml")
        for fault in re.findall(r"\b(?:PLANT|SOURCE)_\w+", path.read_text())
    }
    assert tried == there


@pytest.mark.parametrize("model", ["ring", "lease", "gate", "line", "fetch", "asking", "group"])
def test_model_table_lists_existing_source_names(model: str) -> None:
    """Each "file: name, name" in the table at the top must list names that exist in that file.

    Each step in the table must also exist in the model.
    """
    text_of_model = (HERE / f"{model}.pml").read_text()
    head = text_of_model.split("*/")[0]
    table = head.split("-----\n", 1)[1].split("\n\n", 1)[0]
    for step in re.findall(r"\b(\w+)\(\)", " ".join(line[:40] for line in table.splitlines())):
        assert re.search(rf"^(inline|#define) {step}\(", text_of_model, re.M), f"{step}() is not in the model"
    right = re.sub(r"\([^)]*\)", "", " ".join(line[40:] for line in table.splitlines()))
    named = re.findall(r"(\w+\.(?:cpp|hpp|py)): ((?:[\w:<>]+(?:, )?)+)", re.sub(r"\s+", " ", right))
    assert len(re.findall(r"\w,? ", " ".join(names + " " for _, names in named))) >= 10
    for file, names in named:
        folders = ("remote",) if model == "asking" else ("_core", "run")
        (path,) = (path for folder in folders for path in (SOURCE / folder).rglob(file))
        text = path.read_text()
        for name in re.split(r", ?", names.strip(", ")):
            last = re.split(r"::|>", name)[-1] or name
            assert re.search(rf"\b{re.escape(last)}\b", text), f"{name} is not in {file}"
