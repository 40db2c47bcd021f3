"""Fix the width of each text in a picture, so that the layout also fits in viewers with other fonts.

The layout is computed with the widths of Helvetica. A viewer without Helvetica or Arial uses another font,
such as DejaVu Sans, which may be wider. The SVG therefore specifies ``textLength``, and the viewer scales
each text to the computed width.
"""

from __future__ import annotations

import re
from html import unescape

_TEXT = re.compile(r'<text ([^>]*font-family="Helvetica[^>]*font-size="([\d.]+)"[^>]*)>([^<]+)</text>')

# Adobe's metrics for Helvetica and Helvetica-Bold: widths of the ASCII characters from space, in thousandths.
_REGULAR = (
    "278 278 355 556 556 889 667 191 333 333 389 584 278 333 278 278 556 556 556 556 556 556 556 556 556 556 "
    "278 278 584 584 584 556 1015 667 667 722 722 667 611 778 722 278 500 667 556 833 722 778 667 778 722 "
    "667 611 722 667 944 667 667 611 278 278 278 469 556 333 556 556 500 556 556 278 556 556 222 222 500 222 "
    "833 556 556 556 556 333 500 278 556 500 722 500 500 500 334 260 334 584"
)
_BOLD = (
    "278 333 474 556 556 889 722 238 333 333 389 584 278 333 278 278 556 556 556 556 556 556 556 556 556 556 "
    "333 333 584 584 584 611 975 722 722 722 722 667 611 778 722 278 556 722 611 833 722 778 667 778 722 667 "
    "611 722 667 944 667 667 611 333 278 333 584 556 333 556 611 556 611 556 333 611 611 278 278 556 278 889 "
    "611 611 611 611 389 556 333 611 556 778 556 556 500 389 280 389 584"
)
_OTHERS = {"×": 584, "·": 278, "…": 1000, "—": 1000, "\u2013": 556, "\xa0": 278}
WIDTHS = {
    bold: {chr(32 + place): int(width) for place, width in enumerate(widths.split())} | _OTHERS
    for bold, widths in ((False, _REGULAR), (True, _BOLD))
}
"""Widths of the characters in thousandths of the font size, for regular (False) and bold (True) text."""


def width_of(text: str, size: float, *, bold: bool) -> float | None:
    """Return the width of a text in Helvetica; None if it contains a character of unknown width."""
    widths = [WIDTHS[bold].get(character) for character in text]
    known = [width for width in widths if width is not None]
    return size * sum(known) / 1000 if len(known) == len(widths) else None


def with_widths(svg: str, keep: str) -> str:
    """Add the computed width to each text in a picture, except to texts that contain ``keep``."""

    def fixed(found: re.Match[str]) -> str:
        attributes, size, text = found.groups()
        width = width_of(unescape(text), float(size), bold='font-weight="bold"' in attributes)
        if width is None or keep in text or "textLength" in attributes:
            return found.group()
        return f'<text {attributes} textLength="{width:.2f}" lengthAdjust="spacingAndGlyphs">{text}</text>'

    return _TEXT.sub(fixed, svg)
