"""Test that on systems other than Linux, installation fails immediately with a sentence that suggests a
remedy."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.optional_packages import optional

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("system", ["darwin", "win32"])
def test_build_on_other_systems_ends_with_a_remedy(system: str, tmp_path: Path) -> None:
    """The build backend reads ``pyproject.toml`` as if it were running on another system."""
    build = optional("scikit_build_core.build", "scikit-build-core").__name__
    code = f"import sys; sys.platform = {system!r}; import {build} as b; b.build_wheel({str(tmp_path)!r})"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    (sentence,) = (done.stdout + done.stderr).splitlines()
    assert sentence.startswith("flowchan needs Linux: ")
    assert "WSL 2" in sentence
    assert list(tmp_path.iterdir()) == []
