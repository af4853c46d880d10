"""Files a user names: read in pieces, whatever they may be at most."""

import tracemalloc

import pytest

from headgate.core.files import read_regular


def test_a_short_file_takes_no_memory_for_the_longest_that_is_allowed(tmp_path):
    """Results of a benchmark may have 4 GiB; a machine with less memory reads a short one."""
    file = tmp_path / "result.json"
    file.write_bytes(b"{}")
    tracemalloc.start()
    try:
        assert read_regular(str(file), 1 << 30) == b"{}"
        assert tracemalloc.get_traced_memory()[1] < 1 << 24
    finally:
        tracemalloc.stop()


def test_a_file_of_many_pieces_is_read_to_its_end(tmp_path):
    file = tmp_path / "result.json"
    data = bytes(range(256)) * 20_000
    file.write_bytes(data)
    assert read_regular(str(file), len(data)) == data
    with pytest.raises(OSError, match="more than"):
        read_regular(str(file), len(data) - 1)
