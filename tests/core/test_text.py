"""Names and sizes in messages, and sizes as users write them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from anydevice.errors import BudgetError
from anydevice.text import format_bytes, lay_out_table, list_some, parse_bytes

#: Python itself will not print so large a number; nor will pytest.
HUGE = pytest.param(10**5000, id="huge")


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (7, 7),
        ("7", 7),
        ("512B", 512),
        ("100KB", 100_000),
        ("512MB", 512 * 10**6),
        ("10GB", 10 * 10**9),
        ("10GiB", 10 * 2**30),
        ("1.5TiB", 3 * 2**39),
        (" 2 gib ", 2**31),
        ("3G", 3 * 10**9),
        ("1e3MB", 10**9),
        (2.0**20, 2**20),
        (0.9 * 2**30, 966367641),
        ("1.5e6", 1_500_000),
        ("10.1GiB", 10_844_792_422),
        (2**63 - 1, 2**63 - 1),
        (np.int64(7), 7),
        (np.float32(2**20), 2**20),
        (torch.tensor(7), 7),
    ],
)
def test_sizes_that_can_be_read(text: Any, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    "text",
    [
        *("10 gigs", "", " ", "GB", "-1GB", "1,5GB", "10GBs", "nan", -1, -0.5, -1e9, float("nan")),
        *(float("inf"), True, np.True_, None, b"1GB", [1], pytest.param(-(10**5000), id="minus")),
    ],
)
def test_sizes_that_cannot(text: Any) -> None:
    with pytest.raises(BudgetError, match=r"is not a size: .*'(10|10\.5)GiB'"):
        parse_bytes(text)


@pytest.mark.parametrize("size", [10.5, "10.5", "10.5B", np.float64(10.5), np.float32(0.5)])
def test_a_fraction_of_a_byte_is_a_forgotten_unit(size: Any) -> None:
    with pytest.raises(BudgetError, match=r"no fractions of a byte. Give a unit, such as '10.5GiB"):
        parse_bytes(size)


@pytest.mark.parametrize(
    "size", ["1e400GB", "1e9999999999", "9223372036854775808", "9" * 5000, 2**63, HUGE, 1e30]
)
def test_a_size_that_no_device_has_is_refused_in_a_short_message(size: Any) -> None:
    with pytest.raises(BudgetError, match="is not a size") as caught:
        parse_bytes(size)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (3 << 29, "1.5 GiB"),
        (87 << 20, "87 MiB"),
        (512 << 30, "512 GiB"),
        (-(3 << 20), "-3 MiB"),
        (5 << 50, "5120 TiB"),
    ],
)
def test_sizes_are_written_for_a_person(size: int, text: str) -> None:
    assert format_bytes(size) == text
    assert parse_bytes(text.lstrip("-")) == abs(size)


def test_long_lists_are_cut_short() -> None:
    assert list_some([]) == "nothing"
    assert list_some([], empty="no file") == "no file"
    assert list_some(["a", "b"], 2) == "a, b"
    assert list_some(["a", "b", "c"], 2, separator="; ") == "a; b and 1 more"


def test_columns_are_as_wide_as_their_widest_cell() -> None:
    rows = [("NAME", "BYTES", "NOTE"), ("a", "100000", ""), ("layers", "1", "tied")]
    assert lay_out_table(rows, numbers={1}).splitlines() == [
        "NAME     BYTES  NOTE",
        "a       100000",
        "layers       1  tied",
    ]
