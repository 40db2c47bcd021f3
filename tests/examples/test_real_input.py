"""Run the examples for real input as a user would, each on little input."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from support.preloaded_programs import Template

EXAMPLES = Path(__file__).parents[2] / "examples"


def python(example: str, directory: Path, *args: object) -> list[str]:
    """Return the lines of an example's output. The example must succeed."""
    command = [sys.executable, str(EXAMPLES / example), *map(str, args)]
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def rows_of(file: Path) -> list[dict[str, Any]]:
    """Read the rows without Arrow's threads, which would outlive the test."""
    table = pq.ParquetFile(pa.BufferReader(file.read_bytes()), pre_buffer=False).read(use_threads=False)
    return list(table.to_pylist())


@pytest.mark.parametrize(
    "example", ["thumbnails", "logs_to_parquet", "crawler", "web_service", "training_loop"]
)
def test_example_with_real_input_is_short(example: str) -> None:
    assert len((EXAMPLES / f"{example}.py").read_text().splitlines()) < 80


def test_thumbnails_of_all_pictures_are_on_one_sheet(tmp_path: Path) -> None:
    for place, colour in enumerate(("red", "green", "blue")):
        Image.new("RGB", (400, 300), colour).save(tmp_path / f"{place}.png")
    (tmp_path / "none.png").write_text("no picture")
    assert python("thumbnails.py", tmp_path, tmp_path, "--trace", tmp_path / "trace.json") == [
        "3 pictures on thumbnails.png, 1 other files skipped"
    ]
    sheet = Image.open(tmp_path / "thumbnails.png")
    assert sheet.size == (8 * 96, 96)
    assert {sheet.getpixel((48 + 96 * place, 48)) for place in range(3)} == {
        (255, 0, 0),
        (0, 128, 0),
        (0, 0, 255),
    }


def test_logs_become_rows_in_a_parquet_file(tmp_path: Path) -> None:
    lines = python("logs_to_parquet.py", tmp_path, "json", "csv")
    found = rows_of(tmp_path / "imports.parquet")
    assert lines[0].startswith(f"{len(found):,} imports by 2 programs in imports.parquet")
    assert {row["program"] for row in found if row["module"] == "json.decoder"} == {"json"}
    slowest = max(row["self_us"] for row in found)
    assert lines[1].split()[0] == f"{slowest:,}"


def test_crawler_requests_each_page_once(tmp_path: Path) -> None:
    lines = python("crawler.py", tmp_path, 8)
    assert re.fullmatch(r"8 pages, \d links lead nowhere", lines[0])
    assert all(re.fullmatch(r" +\d+ pages lead to [\w.]+\.html", line) for line in lines[1:])
    assert len(lines) == 6


@pytest.mark.parametrize(
    ("example", "arguments", "share"),
    [("web_service.py", [200], 0.9), ("training_loop.py", ["--epochs", 2], 0.5)],
)
def test_model_recognizes_most_held_out_digits(
    torch_programs: Template, example: str, arguments: list[object], share: float, tmp_path: Path
) -> None:
    done = torch_programs.run(EXAMPLES / example, *arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = re.search(r"([\d.]+) % (right|of the unseen)", done.stdout.splitlines()[-1])
    assert found is not None
    assert float(found[1]) > 100 * share
