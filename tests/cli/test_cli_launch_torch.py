"""Test that scripts for torch.distributed and torchrun also work with ``flowchan launch``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

COMMAND = [sys.executable, "-c", "from flowchan.cli.commands import main; main()", "launch"]

SCRIPT = """
import os, sys
import torch
import torch.distributed as dist
if sys.argv[1] == "flowchan":
    import flowchan.collective.torch.backend

dist.init_process_group(sys.argv[1])
assert dist.is_torchelastic_launched()
assert dist.get_rank() == int(os.environ["RANK"])
x = torch.tensor([1.0 + dist.get_rank()])
dist.all_reduce(x)
found = [None] * dist.get_world_size()
dist.all_gather_object(found, os.environ["ROLE_RANK"])
print(x.item(), *found)
dist.destroy_process_group()
"""


@pytest.mark.parametrize("backend", [pytest.param("gloo", marks=pytest.mark.long), "flowchan"])
def test_ranks_form_a_torch_process_group(tmp_path: Path, backend: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [*COMMAND, "--nproc-per-node", "2", str(script), backend], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[0] 3.0 0 1", "[1] 3.0 0 1"]
