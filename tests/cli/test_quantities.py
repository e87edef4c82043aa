"""Sizes, durations and subsets: what is read, what is refused and with which words."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_cli.errors import QuantityError
from lmcache_cli.quantities import Subset, parse_duration_s, parse_size_bytes, parse_subset, show_duration, show_size


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("500GB", 500 * 10**9),
        ("500GiB", 500 * 2**30),
        ("1.5TiB", 3 * 2**39),
        ("0B", 0),
        ("4096B", 4096),
        ("10 MB", 10**7),
        ("1kB", 1000),
        ("1KB", 1000),
        ("1gb", 10**9),
        ("2gib", 2**31),
        ("0.1kB", 100),
    ],
)
def test_sizes_are_read(text, size_bytes):
    assert parse_size_bytes(text) == size_bytes


def test_a_bare_number_is_refused_and_the_message_says_how_to_write_it():
    with pytest.raises(QuantityError, match="bare number '500'") as refused:
        parse_size_bytes("500")
    assert refused.value.next_step == "write 500B, 500GB or 500GiB"
    with pytest.raises(QuantityError, match="bare number '30'") as refused:
        parse_duration_s("30")
    assert "30d for days" in refused.value.next_step


@pytest.mark.parametrize(
    "text",
    ["", "GB", "-1GB", "1e9B", "5G", "5Gb", "5Gi", "five GB", "1,5GB", "½GB", "٣GB", "9" * 5000 + "GB", "99999999PB"],
)
def test_other_sizes_are_refused(text):
    with pytest.raises(QuantityError):
        parse_size_bytes(text)


@pytest.mark.parametrize(
    ("text", "duration_s"),
    [
        ("30d", 30 * 86400),
        ("12h", 43200),
        ("90m", 5400),
        ("45s", 45),
        ("2w", 14 * 86400),
        ("1d12h", 36 * 3600),
        ("0s", 0),
    ],
)
def test_durations_are_read(text, duration_s):
    assert parse_duration_s(text) == duration_s


@pytest.mark.parametrize("text", ["", "d", "-1d", "1.5h", "1 d 2 h", "1M", "1y", "3d4", "٣d", "9" * 5000 + "d"])
def test_other_durations_are_refused(text):
    with pytest.raises(QuantityError):
        parse_duration_s(text)


def test_subsets_are_read():
    assert parse_subset("1/7") == Subset(1, 7)
    assert parse_subset("7/7") == Subset(7, 7)
    assert parse_subset("auto/30") == Subset(None, 30)


@pytest.mark.parametrize("text", ["", "0/7", "8/7", "1/0", "1", "1/", "/7", "1/7/2", "auto", "auto/0", "-1/7", "1/٧"])
def test_other_subsets_are_refused(text):
    with pytest.raises(QuantityError):
        parse_subset(text)


@given(st.integers(1, 60), st.integers(0, 100_000))
def test_auto_takes_every_share_once_in_as_many_days(count, first_day):
    days = range(first_day, first_day + count)
    assert sorted(Subset(None, count).index_on(day) for day in days) == list(range(1, count + 1))


@given(st.integers(0, 2**63 - 1))
def test_a_size_in_bytes_comes_back(size_bytes):
    assert parse_size_bytes(f"{size_bytes}B") == size_bytes if size_bytes < 10**18 else True


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (1536, "1.5 KiB"), (2**30, "1.0 GiB"), (2**60, "1024.0 PiB")],
)
def test_sizes_for_people(size_bytes, text):
    assert show_size(size_bytes) == text


@pytest.mark.parametrize(
    ("duration_s", "text"),
    [
        (0.85, "850 ms"),
        (12.5, "12.5 s"),
        (59.99, "1 min 0 s"),
        (250, "4 min 10 s"),
        (12_000, "3 h 20 min"),
        (86_399.9, "1 d 0 h"),
        (12 * 86400 + 3 * 3600, "12 d 3 h"),
    ],
)
def test_durations_for_people(duration_s, text):
    assert show_duration(duration_s) == text
