"""Thumbnails of all pictures below a directory, on one sheet to look at.

    python examples/thumbnails.py [DIRECTORY] [-o SHEET.png] [--workers N]

The pictures are those of the installed Python packages unless a directory is named. Files that are none are
counted and left out. Workers are threads, for Pillow lets others go on while it computes.
"""

from __future__ import annotations

import argparse
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from PIL import Image, ImageOps

from flowchan import Graph

SIZE = 96
COLUMNS = 8


def pictures(directory: Path) -> Iterator[Path]:
    for folder, _, files in os.walk(directory):
        yield from (Path(folder, name) for name in files if name.endswith((".png", ".jpg", ".jpeg", ".gif")))


def thumbnail(file: Path) -> Image.Image:
    with Image.open(file) as image:
        return ImageOps.pad(image.convert("RGBA"), (SIZE, SIZE)).convert("RGB")


def count(number: int, _: object) -> int:
    return number + 1


def sheet(images: list[Image.Image]) -> Image.Image:
    rows = -(-len(images) // COLUMNS)
    whole = Image.new("RGB", (COLUMNS * SIZE, max(1, rows) * SIZE), "white")
    for place, image in enumerate(images):
        whole.paste(image, (place % COLUMNS * SIZE, place // COLUMNS * SIZE))
    return whole


def main() -> None:
    parser = argparse.ArgumentParser(description="Thumbnails of all pictures below a directory.")
    parser.add_argument("directory", nargs="?", type=Path, default=Path(sysconfig.get_path("purelib")))
    parser.add_argument("-o", "--output", type=Path, default=Path("thumbnails.png"))
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 2)
    args = parser.parse_args()

    graph = Graph("thumbnails")
    found = graph.source(pictures, args.directory).map(thumbnail, workers=args.workers)
    images, bad = found.collect(), found.errors.reduce(count, 0)
    results = graph.run(progress=True)
    sheet(results[images]).save(args.output)
    print(f"{len(results[images]):,} pictures on {args.output}, {results[bad]:,} files are none")


if __name__ == "__main__":
    main()
