"""Test backward passes under the C++ device guard: failures within a pass, threads, forks, and sanitizers."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from support import scripts
from support.optional_packages import optional
from support.preloaded_programs import Template

torch = optional("torch")

PROGRAM = Path(__file__).with_name("backward_passes.py")
COMPILER = os.environ.get("CXX", "g++")

pytestmark = pytest.mark.skipif(shutil.which(COMPILER) is None, reason="needs a C++ compiler")


def output(programs: Template, *command: object) -> str:
    ended = programs.run(*command)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def outcomes(count: int) -> str:
    return f"{{'equal': {count - count // 10}, 'refused': {count // 10}}} fork 0\n"


def test_failing_passes_do_not_affect_other_passes(torch_programs: Template, long_walk: bool) -> None:
    count = 10_000 if long_walk else 300
    assert in_any_order(output(torch_programs, PROGRAM, count)) == outcomes(count)


def in_any_order(text: str) -> str:
    """Return the program's line with its counts sorted, because threads end in any order."""
    counts = dict(re.findall(r"'(\w+)': (\d+)", text))
    return f"{{{', '.join(f'{name!r}: {counts[name]}' for name in sorted(counts))}}}{text.partition('}')[2]}"


CLOSED = """
import torch
from flowchan import Closed
from flowchan.pipelines import RemoteNodes

with RemoteNodes(2) as nodes:
    x = torch.rand(3, device=nodes[0], requires_grad=True)
    loss = (x.to(nodes[1]) * 2).sum()
try:
    loss.backward()
except Closed as error:
    print(error)
"""


def test_pass_over_closed_nodes_raises(torch_programs: Template) -> None:
    assert "the nodes were closed" in output(torch_programs, "-c", CLOSED)


THREADS = """
import threading
import torch
from flowchan.pipelines import RemoteNodes

def first_pass(loss):
    loss.backward()

with RemoteNodes(3) as nodes:
    for loss_device in ("cpu", nodes[2]):
        x = torch.ones(2, device=nodes[2], requires_grad=True)
        thread = threading.Thread(target=first_pass, args=((x * 3).sum().to(loss_device),))
        thread.start()
        thread.join()
        print(x.grad.tolist(), torch.accelerator.device_count())
    with RemoteNodes(1) as later:
        y = torch.ones(2, device=later[0], requires_grad=True)
        (y * 2).sum().backward()
        print(y.grad.tolist(), later[0], torch.accelerator.device_count())
"""


def test_thread_runs_passes_of_nodes_that_started_later(torch_programs: Template) -> None:
    assert output(torch_programs, "-c", THREADS) == ("[3.0, 3.0] 3\n[3.0, 3.0] 3\n[2.0, 2.0] remote:3 4\n")


WITHOUT_COMPILER = """
import torch
from flowchan.pipelines import RemoteNodes

with RemoteNodes(2) as nodes:
    x = torch.ones(2, device=nodes[1], requires_grad=True)
    (x * 3).sum().backward()
    print(x.grad.tolist())
"""


def test_nodes_work_without_a_compiler(torch_programs: Template, tmp_path: Path) -> None:
    env = os.environ | {"CXX": "no-such-compiler", "TORCH_EXTENSIONS_DIR": str(tmp_path)}
    ended = torch_programs.run("-c", WITHOUT_COMPILER, env=env)
    assert (ended.returncode, ended.stdout) == (0, "[3.0, 3.0]\n")
    for name in ("device_guard.cpp", "command_path.cpp"):
        assert ended.stderr.count(f"remote tensors do not use {name}, so ") == 1
    assert "'no-such-compiler'" in ended.stderr


ASSERTIONS = ("-O1", "-g1", "-UNDEBUG", "-D_GLIBCXX_ASSERTIONS")
SANITIZED = (*ASSERTIONS, "-fsanitize=address,undefined", "-fno-sanitize=vptr", "-fno-sanitize-recover=all")


def run_sanitized(compiled: Path, count: int) -> subprocess.CompletedProcess[str]:
    """Run the program with the address sanitizer, which then also checks torch's heap accesses."""
    libraries = [
        subprocess.check_output([COMPILER, f"-print-file-name={name}"], text=True).strip()
        for name in ("libasan.so", "libubsan.so", "libstdc++.so")
    ]
    env = {"LD_PRELOAD": " ".join(libraries), "ASAN_OPTIONS": "detect_leaks=0"}
    with scripts.start(PROGRAM, str(count), compiled, env=env) as process:
        out, err = process.communicate()
    return subprocess.CompletedProcess([], process.returncode, out, err)


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_sanitizers_report_no_error_in_backward_passes(tmp_path: Path) -> None:
    from flowchan_torch import native

    native.compile_to(tmp_path / "device_guard.so", SANITIZED)
    ended = run_sanitized(tmp_path / "device_guard.so", 2000)
    assert (ended.returncode, in_any_order(ended.stdout)) == (0, outcomes(2000)), ended.stderr
    assert "ERROR" not in ended.stderr


PLANT = (
    "device_count = static_cast<DeviceIndex>(value);",
    "char* freed = new char[8]; delete[] freed; device_count = freed[0];",
)


@pytest.mark.long
def test_sanitizers_find_a_fault_planted_in_the_guard(tmp_path: Path) -> None:
    from flowchan_torch import native

    before, after = PLANT
    text = native.SOURCE.read_text()
    assert before in text
    planted = tmp_path / native.SOURCE.name
    planted.write_text(text.replace(before, after))
    native.compile_to(tmp_path / "device_guard.so", SANITIZED, planted)
    ended = run_sanitized(tmp_path / "device_guard.so", 20)
    assert ended.returncode != 0
    assert "heap-use-after-free" in ended.stderr
