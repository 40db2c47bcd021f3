"""Save the page of a run as a single HTML file that needs neither a server nor other files."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

STATIC = Path(__file__).with_name("static")
"""Folder with the page's HTML, CSS and JavaScript files."""

_STYLE = re.compile(r'<link rel="stylesheet" href="static/([^"]+)">')
_SCRIPT = re.compile(r'<script src="static/([^"]+)"></script>')


def saved_page(data: Any, static: Path = STATIC) -> tuple[str, str]:
    """Return the page with its styles, its scripts and ``data`` embedded.

    Args:
        data: JSON value that the page shows.
        static: Folder with the page's files.

    Returns:
        The HTML text, and the content security policy that it contains. The policy allows only the styles
        and scripts in the text.
    """
    hashes: dict[str, list[str]] = {"script": [], "style": []}

    def inline(tag: str) -> Callable[[re.Match[str]], str]:
        def element(found: re.Match[str]) -> str:
            # Only a closing tag could end the element. In CSS and JavaScript strings, the backslash has no
            # effect.
            text = (static / found[1]).read_text(encoding="utf-8").replace(f"</{tag}", f"<\\/{tag}")
            digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
            hashes[tag].append(f"'sha256-{digest}'")
            return f"<{tag}>{text}</{tag}>"

        return element

    page = (static / "page.html").read_text(encoding="utf-8")
    page = _SCRIPT.sub(inline("script"), _STYLE.sub(inline("style"), page))
    policy = (
        f"default-src 'none'; script-src {' '.join(hashes['script'])}; "
        f"style-src {' '.join(hashes['style'])}; img-src data:; base-uri 'none'; form-action 'none'"
    )
    meta = f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
    # Escape "<", so that no string can end the element.
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    saved = f'<script type="application/json" id="saved">{text}</script>'
    page = page.replace("<head>", f"<head>\n{meta}", 1)
    # The data must come before the page's scripts, which look for this element.
    return page.replace("<body>", f"<body>\n{saved}", 1), policy
