"""Make thumbnails of all pictures below a directory, and put them on one sheet.

    python examples/thumbnails.py [DIRECTORY] [-o SHEET.png] [--workers N] [--trace TRACE.json]
    flowchan viz examples/thumbnails.py -o thumbnails.svg

The default directory contains the installed Python packages. The program skips and counts files that Pillow
cannot read. To see what each worker did, open the trace at https://ui.perfetto.dev. The workers are threads,
because Pillow releases the GIL while it computes. The example needs pillow.
"""

from __future__ import annotations

import argparse
import os
import sysconfig
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from PIL import Image, ImageOps

from flowchan import Graph

PACKAGES = Path(sysconfig.get_path("purelib"))
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


def save(images_and_bad: tuple[list[Image.Image], int], output: str) -> None:
    images, bad = images_and_bad
    rows = -(-len(images) // COLUMNS)
    sheet = Image.new("RGB", (COLUMNS * SIZE, max(1, rows) * SIZE), "white")
    for place, image in enumerate(images):
        sheet.paste(image, (place % COLUMNS * SIZE, place // COLUMNS * SIZE))
    sheet.save(output)
    print(f"{len(images):,} pictures on {output}, {bad:,} other files skipped")


def thumbnails(
    directory: Path = PACKAGES, output: str = "thumbnails.png", workers: int = os.cpu_count() or 2
) -> Graph:
    graph = Graph("thumbnails")
    found = graph.source(pictures, directory).map(thumbnail, workers=workers)
    images, bad = found.collect(), found.errors.reduce(count, 0)
    images.zip(bad).sink(partial(save, output=output))
    return graph


def main() -> None:
    parser = argparse.ArgumentParser(description="Make thumbnails of all pictures below a directory.")
    parser.add_argument("directory", nargs="?", type=Path, default=PACKAGES)
    parser.add_argument("-o", "--output", default="thumbnails.png")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 2)
    parser.add_argument("--trace", help="file for a trace of the run")
    args = parser.parse_args()
    thumbnails(args.directory, args.output, args.workers).run(progress=True, trace=args.trace)


if __name__ == "__main__":
    main()
