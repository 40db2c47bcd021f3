"""Define flowchan's version, and check that both ends of a connection run the same versions.

The version is a constant in this file, which the build reads. To read it from the installation's metadata
would take a sixth of an agent's start time.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

VERSION = "0.1.0"


def versions() -> dict[str, Any]:
    """Return the versions that must be equal on both ends."""
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    return {"python": python, "flowchan": VERSION}


def differs(peer_versions: Mapping[str, Any]) -> str:
    """Return why this process cannot communicate with a peer of these versions, or "" if it can."""
    ours = versions()
    if all(peer_versions.get(word) == version for word, version in ours.items()):
        return ""
    both = f"it has {_listed(peer_versions)}, but this program has {_listed(ours)}"
    return f"{both}; install the same versions on both"


def _listed(versions: Mapping[str, Any]) -> str:
    return f"Python {versions.get('python')} and flowchan {versions.get('flowchan')}"
