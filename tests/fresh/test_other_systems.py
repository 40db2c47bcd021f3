"""Test the installation on other systems: without the native module on macOS, and refused on Windows.

The build backend reads ``pyproject.toml`` as if it ran on another system.
"""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

from support.optional_packages import optional

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
from flowchan import Graph, native
graph = Graph()
squares = graph.source(range(4)).map(lambda n: n * n, workers=2).collect()
print(native.is_compiled(), native.__file__, graph.run()[squares])
"""


def build(system: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Build a wheel as on another system."""
    backend = optional("scikit_build_core.build", "scikit-build-core").__name__
    code = f"import platform, sys, sysconfig; sysconfig.get_config_vars(); sys.platform = {system!r}\n"
    code += "platform.mac_ver = lambda: ('14.0', ('', '', ''), 'arm64')\n"
    code += f"import {backend} as b; b.build_wheel({str(folder)!r})"
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)


def test_build_on_windows_ends_with_a_remedy(tmp_path: Path) -> None:
    done = build("win32", tmp_path)
    assert done.returncode != 0
    (sentence,) = (done.stdout + done.stderr).splitlines()
    assert sentence.startswith("flowchan runs on Linux")
    assert "WSL 2" in sentence
    assert list(tmp_path.iterdir()) == []


def test_wheel_for_macos_runs_without_the_native_module(tmp_path: Path) -> None:
    """The wheel has no compiled module, so it also runs here, between threads."""
    done = build("darwin", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = tmp_path.iterdir()
    assert wheel.name.endswith("-py3-none-any.whl")
    unpacked = tmp_path / "unpacked"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(unpacked)
    assert not list(unpacked.rglob("*.so"))
    before = (
        "import sys; sys.meta_path[:] = [f for f in sys.meta_path if 'editable' not in type(f).__module__]\n"
    )
    command = [sys.executable, "-c", before + f"sys.path.insert(0, {str(unpacked)!r})\n" + PROGRAM]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ran.stdout == f"False {unpacked / 'flowchan' / 'native.py'} [0, 1, 4, 9]\n", ran.stderr
