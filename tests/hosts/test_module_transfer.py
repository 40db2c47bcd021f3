"""Test how code reaches a host: by value from user modules that the host lacks, otherwise by name."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import cloudpickle
import pytest

from flowchan.hosts.code import lacking, own_modules, pack_stage


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Create a user module that only this process can import, and return its name."""
    (tmp_path / "only_mine.py").write_text(
        "import json\nclass Number(int): pass\ndef use(item): return json.dumps(Number(item))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    __import__("only_mine")
    monkeypatch.setitem(sys.modules, "only_mine", sys.modules["only_mine"])
    return "only_mine"


def other_folder(packed: bytes, folder: Path, call: str) -> str:
    """Apply ``call`` to the stage in a program that lacks the module, and return the program's output."""
    (folder / "packed").write_bytes(packed)
    program = f"import cloudpickle, sys\nstage = cloudpickle.load(open('packed', 'rb'))\nprint({call})"
    done = subprocess.run([sys.executable, "-c", program], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_only_the_users_modules_are_listed(own_module: str) -> None:
    own = sys.modules[own_module]
    assert own_modules(pack_stage((own.use, json.dumps, cloudpickle.dumps), ())) == (own_module,)


def test_missing_modules_are_reported_without_being_imported(own_module: str, tmp_path: Path) -> None:
    (tmp_path / "explodes.py").write_text("raise AssertionError")
    assert lacking([own_module, "json", "explodes", "no_such_module", "no_such.at_all"]) == (
        "no_such_module", "no_such.at_all",
    )  # fmt: skip
    assert "explodes" not in sys.modules


@pytest.mark.parametrize("what", ["import only_mine; only_mine.use(1)", "from only_mine import use"])
def test_missing_attribute_of_a_sent_module_is_named(what: str, own_module: str, tmp_path: Path) -> None:
    """Only the module's classes were sent, so a function that imports the module later finds only the
    classes."""
    folder = tmp_path / "there"
    folder.mkdir()
    packed = pack_stage(sys.modules[own_module].Number, [own_module])
    call = f"exec({what!r})"
    with pytest.raises(AssertionError, match=r"without 'use'|'use' from 'only_mine' .not on this host; its"):
        other_folder(packed, folder, call)


def test_module_is_sent_by_value_with_its_classes(own_module: str, tmp_path: Path) -> None:
    folder = tmp_path / "there"
    folder.mkdir()
    packed = pack_stage(sys.modules[own_module].use, [own_module])
    assert other_folder(packed, folder, "stage(3)") == "3"
    assert other_folder(packed, folder, "sys.modules['only_mine'].Number(4)") == "4"
    assert own_module not in cloudpickle.list_registry_pickle_by_value()
