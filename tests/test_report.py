from __future__ import annotations

from jaxsync.report import format_bytes, format_table


def test_units_change_at_powers_of_1024() -> None:
    sizes = [0, 1023, 1024, 1 << 20, 1 << 30, 5 << 40]
    assert [format_bytes(n) for n in sizes] == ["0 B", "1023 B", "1.0 KiB", "1.0 MiB", "1.0 GiB", "5.0 TiB"]


def test_a_table_without_rows_has_its_header() -> None:
    assert format_table(["a", "bc"], []) == "a  bc\n-  --"
