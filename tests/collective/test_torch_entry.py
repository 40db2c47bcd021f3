"""Test that torch knows the ``flowchan`` backend before flowchan is imported, and imports it on first use."""

from __future__ import annotations

import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.skipif(
    not hasattr(torch, "_import_device_backends"),
    reason="this version of torch does not load backends: install 2.5 or newer",
)

USE = """
import sys, torch, torch.distributed as dist
print([name for name in sys.modules if name.partition(".")[0] == "flowchan"])
dist.init_process_group("flowchan", store=dist.HashStore(), rank=0, world_size=1)
x = torch.full((3,), 2.0)
dist.all_reduce(x)
print(type(dist.group.WORLD).__module__, x.tolist())
import flowchan.collective.torch.backend
dist.new_group([0]).barrier().wait()
dist.destroy_process_group()
"""
REFUSED = """
import torch, torch.distributed as dist
import flowchan_torch
def register_backend(*_, **__):
    raise TypeError("other arguments")
dist.Backend.register_backend = register_backend
flowchan_torch.register()
del __import__("sys").modules["torch.distributed"]
flowchan_torch.register()
print("imported")
"""


def output(program: str) -> list[str]:
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.splitlines()


def test_backend_name_needs_no_import() -> None:
    assert output(USE) == ["[]", "flowchan.collective.torch.backend [2.0, 2.0, 2.0]"]


def test_torch_can_be_imported_if_its_backend_registry_has_changed() -> None:
    assert output(REFUSED) == ["imported"]
