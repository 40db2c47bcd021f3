"""The version of flowchan, and whether both ends of a connection have the same.

The build reads it from here; reading the metadata of the installation would take a sixth of an agent's start.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

VERSION = "0.1.0"


def versions() -> dict[str, Any]:
    """Of what both sides must have the same."""
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    return {"python": python, "flowchan": VERSION}


def differs(theirs: Mapping[str, Any]) -> str:
    """Why we can't work with whom this hello has come from; empty if we can."""
    ours = versions()
    if all(theirs.get(word) == version for word, version in ours.items()):
        return ""
    return f"it has {_said(theirs)}, and this program {_said(ours)}; both must have the same"


def _said(versions: Mapping[str, Any]) -> str:
    return f"Python {versions.get('python')} and flowchan {versions.get('flowchan')}"
