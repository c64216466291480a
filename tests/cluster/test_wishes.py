"""Sizes and flags of the memory budget: read strictly, later ones win."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3ray.cluster.presets import PRESETS
from k3ray.cluster.wishes import SizeFailure, Wishes, merge_wishes, parse_size


@pytest.mark.parametrize(("text", "nbytes"), [
    ("24G", 24 * 10**9), ("24GB", 24 * 10**9), ("24GiB", 24 * 2**30), ("24Gi", 24 * 2**30), ("500M", 5 * 10**8),
    ("1.5G", 1_500_000_000), ("0.5KiB", 512), ("1T", 10**12), ("1.5TiB", 3 * 2**39), ("2k", 2000), ("7 GB", 7 * 10**9),
    ("0.000000001G", 1), ("1.9999999999G", 1_999_999_999),
])  # fmt: skip
def test_sizes(text: str, nbytes: int) -> None:
    assert parse_size(text, "--memory") == nbytes


@pytest.mark.parametrize("text", [
    "", "24", "G", "-1G", "+1G", "1e3G", "1,5G", "24GG", "24 G B", "24X", "0G", "0.0000000001G", "nan", "infG", ".5G",
    "5.G", " 24G", "24G ", "24G\n", "0x10G", "24B", "٣G", "9" * 16 + "G", "999999999999999T", "24iB",
])  # fmt: skip
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(SizeFailure, match="--memory: found") as failure:
        parse_size(text, "--memory")
    assert failure.value.exit_code == 2 and "expected" in str(failure.value)


@given(st.text(max_size=12))
def test_any_text_is_a_size_or_refused(text: str) -> None:
    with contextlib.suppress(SizeFailure):
        assert parse_size(text, "--memory") >= 1


@pytest.mark.parametrize(("flags", "wishes"), [
    ([], Wishes()),
    ([("--memory", "24G")], Wishes(total_bytes=24 * 10**9)),
    ([("--memory", "24G"), ("--preset", "laptop")], Wishes(preset="laptop")),
    ([("--preset", "laptop"), ("--memory", "24G")], Wishes(total_bytes=24 * 10**9)),
    ([("--preset", "laptop"), ("--cache-gb", "4")], Wishes(preset="laptop", cache_bytes=4 * 10**9)),
    ([("--cache-gb", "4"), ("--preset", "laptop")], Wishes(preset="laptop")),
    ([("--trunk-gb", "6"), ("--trunk-gb", "auto")], Wishes()),
    ([("--trunk-gb", "0"), ("--cache-gb", "1.5")], Wishes(trunk_bytes=0, cache_bytes=1_500_000_000)),
    ([("--memory", "1G"), ("--trunk-gb", "6"), ("--cache-gb", "1"), ("--memory", "2G")], Wishes(total_bytes=2 * 10**9)),
])  # fmt: skip
def test_later_flags_win(flags: list[tuple[str, str]], wishes: Wishes) -> None:
    assert merge_wishes(flags) == wishes


@pytest.mark.parametrize(("flag", "value"), [
    ("--preset", "Laptop"), ("--preset", ""), ("--trunk-gb", "6G"), ("--trunk-gb", "-1"), ("--trunk-gb", "full"),
    ("--cache-gb", "auto"), ("--cache-gb", ""), ("--cache-gb", "nan"), ("--cache-gb", "1e3"), ("--memory", "lots"),
])  # fmt: skip
def test_values_that_are_refused(flag: str, value: str) -> None:
    with pytest.raises(SizeFailure, match=f"{flag}: found") as failure:
        merge_wishes([(flag, value)])
    assert "expected" in str(failure.value)


def test_every_preset_can_be_asked_for() -> None:
    assert list(PRESETS) == ["ultra", "laptop", "desktop", "workstation", "server", "max", "auto"]
    assert [merge_wishes([("--preset", name)]).preset for name in PRESETS] == list(PRESETS)
