"""Test ``tools/release``: the names of the wheels, and the checks of ``make release``."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from flowchan.transport.versions import VERSION
from tools.release import checks
from tools.release.roots import NotHere, System, local, with_local
from tools.release.targets import Target, selected

ROOT = Path(__file__).parents[1]
INFO = f"flowchan-{VERSION}.dist-info"
TARGET = Target("cp313", "manylinux_2_28", "x86_64")


def test_release_has_every_promised_wheel() -> None:
    names = {str(target) for target in selected([])}
    assert names == {
        f"{abi}-{libc}_{machine}"
        for abi in ("cp311", "cp312", "cp313", "cp314", "cp314t")
        for libc in ("manylinux_2_28", "musllinux_1_2")
        for machine in ("x86_64", "aarch64")
    }


@pytest.mark.parametrize(
    ("name", "tag", "zig", "suffix"),
    [
        (
            "cp311-manylinux_2_28_x86_64",
            "cp311-cp311-linux_x86_64",
            "x86_64-linux-gnu.2.28",
            ".cpython-311-x86_64-linux-gnu.so",
        ),
        (
            "cp314t-musllinux_1_2_aarch64",
            "cp314-cp314t-linux_aarch64",
            "aarch64-linux-musl",
            ".cpython-314t-aarch64-linux-musl.so",
        ),
    ],
)
def test_target_computes_tags_and_suffix(name: str, tag: str, zig: str, suffix: str) -> None:
    (target,) = selected([name])
    assert (target.tag, target.zig, target.suffix) == (tag, zig, suffix)


def test_suffix_matches_the_running_python() -> None:
    import sysconfig

    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    abi = f"cp{sys.version_info[0]}{sys.version_info[1]}{sys.abiflags}"
    libc = "musllinux_1_2" if "musl" in suffix else "manylinux_2_28"
    assert Target(abi, libc, sysconfig.get_platform().split("-")[1]).suffix == suffix


def test_pattern_without_a_wheel_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"WHEELS must match a wheel, got cp310\*"):
        selected(["cp311-*", "cp310*"])


def test_sdist_has_version_and_every_tracked_file(tmp_path: Path) -> None:
    pytest.importorskip("scikit_build_core")
    if subprocess.run(["git", "rev-parse"], cwd=ROOT, capture_output=True).returncode:
        pytest.skip("git does not track these files: run the test in a clone")
    build = f"from scikit_build_core.build import build_sdist; build_sdist({str(tmp_path)!r})"
    subprocess.run([sys.executable, "-c", build], cwd=ROOT, check=True, capture_output=True)
    (archive,) = tmp_path.glob("*.tar.gz")
    checks.check_sdist(archive, ROOT)


def made_wheel(
    folder: Path, version: str = VERSION, core: str = "", tag: str = "", binary: bytes = b""
) -> Path:
    """Write a wheel with the files that the checks read. The licences in the wheel are the project's."""
    path = folder / f"flowchan-{version}-{tag or 'cp313-cp313-manylinux_2_28_x86_64'}.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{INFO}/METADATA", f"Metadata-Version: 2.4\nName: flowchan\nVersion: {version}\n")
        archive.writestr(
            f"{INFO}/WHEEL",
            f"Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: {path.stem.split('-', 2)[2]}\n",
        )
        archive.writestr(f"{INFO}/RECORD", "")
        archive.writestr("flowchan/_core.pyi", "")
        archive.writestr(core or f"flowchan/_core{TARGET.suffix}", binary)
        for file in [ROOT / "LICENSE", *ROOT.glob("licenses/*.txt")]:
            archive.write(file, f"{INFO}/licenses/{file.relative_to(ROOT)}")
    return path


def test_check_accepts_a_right_wheel(tmp_path: Path) -> None:
    checks.check_wheel(made_wheel(tmp_path), TARGET, ROOT, [ROOT])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"version": "9.9"}, "version must be"),
        ({"tag": "cp313-cp313t-manylinux_2_28_x86_64"}, "must have the tags"),
        ({"tag": "cp313-cp313-manylinux_2_28_aarch64"}, "must have the tags"),
        ({"core": "flowchan/_core.abi3.so"}, "its core must end with"),
        ({"binary": bytes(ROOT / "flowchan")}, "must not contain the path"),
    ],
)
def test_check_rejects_a_wrong_wheel(tmp_path: Path, options: dict[str, str], message: str) -> None:
    with pytest.raises(checks.Wrong, match=re.escape(message)):
        checks.check_wheel(made_wheel(tmp_path, **options), TARGET, ROOT, [ROOT])  # type: ignore[arg-type]


def test_check_rejects_builds_with_different_bytes(tmp_path: Path) -> None:
    for name in ("first", "second"):
        (tmp_path / name).write_text(name)
    checks.same(tmp_path / "first", tmp_path / "first")
    with pytest.raises(checks.Wrong, match="must have the same bytes"):
        checks.same(tmp_path / "first", tmp_path / "second")


def test_wheel_for_another_processor_installs_from_outside(tmp_path: Path) -> None:
    (target,) = selected(["cp313-manylinux*aarch64"])
    path = made_wheel(tmp_path, core="flowchan/__init__.py", tag=f"cp313-cp313-{target.platform}")
    packages = tmp_path / "site-packages"
    checks.install_from_outside(path, target, packages)
    assert (packages / INFO / "licenses/LICENSE").read_text() == (ROOT / "LICENSE").read_text()
    assert sorted(file.name for file in packages.glob("flowchan/*")) == ["__init__.py", "_core.pyi"]
    with pytest.raises(subprocess.CalledProcessError) as raised:
        checks.install_from_outside(path, TARGET, packages)
    assert "not a supported wheel" in raised.value.stderr


def test_program_of_the_readme_is_found() -> None:
    program = checks.first_program((ROOT / "README.md").read_text())
    compile(program, "wordcount.py", "exec")
    assert 'on="process"' in program  # the check with threads replaces this argument


@pytest.mark.parametrize(("name", "abi3"), [("cp314-musl*x86_64", True), ("cp314t-musl*x86_64", False)])
def test_free_threaded_wheel_downloads_no_stable_abi(name: str, abi3: bool) -> None:
    (target,) = selected([name])
    options = checks.download_options(target)
    assert ("--abi=abi3" in options) == abi3
    assert f"--abi={target.abi}" in options
    assert [option for option in options if "platform" in option] == [
        "--platform=musllinux_1_2_x86_64",
        "--platform=musllinux_1_1_x86_64",
    ]


def test_python_of_this_machine_is_found() -> None:
    found = local(f"{sys.version_info[0]}.{sys.version_info[1]}{sys.abiflags}")
    assert found.prefix == Path(sys.base_prefix)
    assert (found.include / "Python.h").exists()
    with pytest.raises(NotHere, match=r"python9\.9 is not on this machine"):
        local("9.9")


def test_python_of_another_processor_is_never_local() -> None:
    (target,) = selected(["cp312-manylinux*aarch64"])
    with pytest.raises(NotHere, match=r"Debian has no CPython 3\.12 for aarch64"):
        with_local(target, pytest.fail)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may call chroot")
def test_system_sees_mounts_that_it_cannot_change(tmp_path: Path) -> None:
    for name in ("proc", "dev/shm"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("bin", "sbin", "lib", "lib64"):
        (tmp_path / name).symlink_to(f"usr/{name}")
    mounted = tmp_path.parent / f"{tmp_path.name} mounted"
    mounted.mkdir()
    (mounted / "file").write_text("seen")
    system = System(tmp_path, [Path("/usr"), mounted])
    assert system.run("cat", mounted / "file") == "seen"
    with pytest.raises(subprocess.CalledProcessError, match="touch"):
        system.run("touch", mounted / "other")
    assert list(mounted.iterdir()) == [mounted / "file"]
    assert system.run("sh", "-c", "echo $$") == "1\n"
    assert list((tmp_path / "usr").iterdir()) == []
