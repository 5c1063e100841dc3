"""Which tests `make test` leaves out: the lists in tests/conftest.py, and what it makes of them."""

from __future__ import annotations

import itertools
import re

from tests.conftest import FOR_CI, LONGEST, NIGHTLY, QUICK, ROOT, THINNED, spare


def test_every_line_of_the_lists_is_the_beginning_of_a_tests_name():
    for line in (*LONGEST, *NIGHTLY, *FOR_CI, *THINNED):
        path, _, name = line.partition("::")
        found = [*(ROOT / "tests").glob(f"{path}*")]
        assert found, line
        if name:
            begin = re.escape(name.partition("[")[0])
            assert re.search(f"^def {begin}", found[0].read_text(), re.MULTILINE), line


def test_what_stays_has_every_value_and_tests_do_not_all_combine_them_alike():
    values = [("cpu", "emulator"), ("f16", "bf16", "f32", "f64", "c64"), ("1", "2", "3")]
    ways = set()
    for test in "abcdef":
        names = {f"{test}.py::test[{'-'.join(each)}]" for each in itertools.product(*values)}
        stay = {name.partition("[")[2][:-1] for name in names - {*spare([*names])}}
        columns = zip(*(each.split("-") for each in stay), strict=True)
        assert [*map(set, columns)] == [*map(set, values)] and len(stay) < len(names) / 3
        ways.add(frozenset(stay))
    assert len(ways) > 3
    few = [f"a.py::test[{a}-{b}]" for a in "abc" for b in "de"]
    assert len(spare(few)) == len(few) - QUICK
