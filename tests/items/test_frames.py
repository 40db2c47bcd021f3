"""Send the memory of data frames and images: they arrive equal, are read in place, and carry no unrelated
data."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.optional_packages import optional

from flowchan import Channel, pack
from flowchan.items import arrow

pl, pa = optional("polars"), optional("pyarrow")
Image, ImageDraw = optional("PIL.Image", "pillow"), optional("PIL.ImageDraw", "pillow")

NUMBERS = pl.DataFrame({"a": np.arange(100_000), "b": np.arange(100_000) / 2})
KINDS = pl.DataFrame(
    {
        "text": ["a", None, "a text that is too long to lie in a view"],
        "category": pl.Series(["u", "v", "u"], dtype=pl.Categorical),
        "enum": pl.Series(["u", "v", "u"], dtype=pl.Enum(["u", "v"])),
        "list": [[1], [2, 3], None],
        "array": pl.Series([[1, 2]] * 3, dtype=pl.Array(pl.Int8, 2)),
        "struct": [{"x": 1}] * 3,
        "flag": [True, False, None],
        "nothing": [None] * 3,
        "bytes": [b"x", b"", None],
        "decimal": pl.Series([1, 2, 3], dtype=pl.Decimal(10, 2)),
        "date": [datetime.date(2020, 1, 1)] * 3,
        "when": [datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)] * 3,
        "how_long": [datetime.timedelta(1)] * 3,
    }
)


def sent(value: Any) -> tuple[Any, int]:
    """Send a value, and return the received value and the number of bytes that it used in the channel."""
    channel = Channel(across="processes", max_bytes=1 << 28)
    channel.put(value)
    return channel.get(), channel.stats().bytes_in


def in_band(value: Any) -> int:
    """Return the size of the pickle without its buffers."""
    packed = pack(value)
    return len(packed if isinstance(packed, bytes) else packed[0])


@pytest.mark.parametrize(
    "frame",
    [
        NUMBERS,
        KINDS,
        KINDS.slice(1, 1),
        KINDS.clear(),
        pl.DataFrame(),
        pl.concat([KINDS, KINDS], rechunk=False),
    ],
)
def test_a_polars_frame_arrives_equal_with_its_types(frame: pl.DataFrame) -> None:
    arrived, _ = sent(frame)
    assert arrived.schema == frame.schema
    assert arrived.equals(frame)


@pytest.mark.parametrize("name", ["Int128", "UInt128"])
def test_polars_frame_with_integers_that_arrow_lacks_arrives_equal(name: str) -> None:
    if not hasattr(pl, name):
        pytest.skip(f"this polars has no {name}")
    column = pl.Series("wide", [1, 2**100, None], dtype=getattr(pl, name))
    frame = pl.DataFrame([column]).with_columns(pl.struct(column).alias("nested"))
    found = sent(frame)[0]
    assert found.equals(frame)
    assert found.dtypes == frame.dtypes
    assert sent(column)[0].equals(column)


def test_a_polars_series_arrives_equal_and_may_be_changed() -> None:
    series, _ = sent(NUMBERS["a"])
    assert series.equals(NUMBERS["a"])
    series[0] = 7
    assert (series[0], NUMBERS["a"][0]) == (7, 0)


@pytest.mark.parametrize("value", [NUMBERS, NUMBERS["a"], NUMBERS.to_arrow(), Image.new("RGB", (300, 200))])
def test_contents_are_sent_outside_the_pickle(value: Any) -> None:
    assert in_band({"nested": [value]}) < 5000


@pytest.mark.parametrize(
    "part",
    [
        lambda: NUMBERS.slice(10, 5),
        lambda: NUMBERS.to_arrow().slice(10, 5),
        lambda: NUMBERS.to_arrow().to_batches()[0].slice(3, 2),
    ],
    ids=["polars", "table", "batch"],
)
def test_only_the_data_of_a_slice_is_sent(part: Callable[[], Any]) -> None:
    arrived, size = sent(part())
    assert type(arrived) is type(part())
    assert arrived.equals(part())
    assert size < 5000


def test_put_of_a_frame_with_python_objects_raises() -> None:
    with pytest.raises(TypeError, match="Object"):
        sent(pl.DataFrame({"o": pl.Series([object()], dtype=pl.Object)}))


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr", "I", "F", "I;16"])
@pytest.mark.parametrize("size", [(64, 48), (2500, 2000)], ids=["one piece", "pieces"])
def test_an_image_arrives_equal(mode: str, size: tuple[int, int]) -> None:
    image = Image.linear_gradient("L").resize(size).convert(mode)
    image.info["dpi"] = (72, 72)
    arrived, _ = sent(image)
    assert (arrived.mode, arrived.size, arrived.info) == (mode, size, image.info)
    assert arrived.tobytes() == image.tobytes()


@pytest.mark.parametrize(
    ("kind", "mode"), [("png", "P"), ("png", "RGBA"), ("gif", "L"), ("tiff", "I;16"), ("bmp", "1")]
)
@pytest.mark.parametrize("loaded", [False, True])
def test_an_image_read_from_a_file_arrives_equal(kind: str, mode: str, loaded: bool, tmp_path: Path) -> None:
    """Pillow itself pickles an image that was read from a file, and keeps its format."""
    path = tmp_path / f"image.{kind}"
    Image.linear_gradient("L").convert(mode).save(path)
    with Image.open(path) as image:
        if loaded:
            image.load()
        arrived, _ = sent(image)
        assert (arrived.format, arrived.mode, arrived.size) == (image.format, image.mode, image.size)
        assert (arrived.info, arrived.getpalette()) == (image.info, image.getpalette())
        assert arrived.tobytes() == image.tobytes()


@pytest.mark.parametrize("mode", ["L", "RGB", "RGBA", "CMYK"])
def test_copied_image_from_a_file_is_sent_outside_the_pickle(mode: str, tmp_path: Path) -> None:
    Image.linear_gradient("L").convert(mode).save(tmp_path / "image.tiff")
    with Image.open(tmp_path / "image.tiff") as image:
        assert in_band(image) > 60_000
        assert in_band(image.copy()) < 5000


def test_changing_a_received_image_does_not_change_the_item() -> None:
    channel = Channel(across="processes")
    image = Image.new("RGB", (64, 64), "white")
    channel.put(image)
    arrived = channel.get()
    assert arrived.readonly
    ImageDraw.Draw(arrived).rectangle((0, 0, 8, 8), fill="red")
    assert arrived.getpixel((1, 1)) == (255, 0, 0)
    assert image.getpixel((1, 1)) == (255, 255, 255)


def test_libraries_use_their_own_pickling_if_arrow_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrow, "_has_arrow", lambda: False)
    assert list(arrow.reducers()) == []


@pytest.mark.parametrize(
    ("module", "newer", "kind"), [(pl, "CompatLevel", pl.Series), (Image, "fromarrow", Image.Image)]
)
def test_older_libraries_without_arrow_support_use_their_pickling(
    monkeypatch: pytest.MonkeyPatch, module: Any, newer: str, kind: type
) -> None:
    assert kind in dict(arrow.reducers())
    monkeypatch.delattr(module, newer)
    assert kind not in dict(arrow.reducers())


def test_chunked_table_arrives_equal() -> None:
    table = pa.concat_tables([NUMBERS.to_arrow(), NUMBERS.to_arrow()])
    arrived, _ = sent(table)
    assert arrived.equals(table)
