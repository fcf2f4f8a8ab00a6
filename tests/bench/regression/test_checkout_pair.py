"""Comparison of two checkouts' results: every difference is reported, and nothing else."""

from pathlib import Path

from bench.regression.checkout_pair import compare, first_difference, read_tree


def test_a_changed_byte_of_a_file_is_reported(tmp_path: Path) -> None:
    for side in ("this", "other"):
        (tmp_path / side / "sub").mkdir(parents=True)
        (tmp_path / side / "sub" / "weights").write_bytes(bytes(range(256)))
        (tmp_path / side / "config").write_text("{}")
    this, other = (read_tree(tmp_path / side) for side in ("this", "other"))
    assert [row.equal for row in compare("conversions", this, other)] == [True, True]
    changed = bytearray(range(256))
    changed[77] ^= 1
    (tmp_path / "other" / "sub" / "weights").write_bytes(changed)
    rows = compare("conversions", this, read_tree(tmp_path / "other"))
    assert [row.name for row in rows if not row.equal] == ["sub/weights"]
    assert "from byte 77 on" in next(row.difference for row in rows if not row.equal)


def test_results_of_only_one_checkout_are_differences() -> None:
    rows = compare("tuning", {"a": b"1", "b": b"2"}, {"a": b"1", "c": b"2"})
    assert [(row.name, row.difference) for row in rows] == [
        ("a", ""),
        ("b", "only in this checkout"),
        ("c", "only in the other checkout"),
    ]


def test_a_truncated_result_differs_at_its_end() -> None:
    assert first_difference(b"abc", b"abc") == ""
    assert "from byte 3 on, 3 and 4 bytes" in first_difference(b"abc", b"abcd")
