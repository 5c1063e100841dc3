"""Compile every kernel and write the records to bench/results: `make bench-compiled`."""

from __future__ import annotations

import sys

from bench.static_analysis import table
from bench.static_analysis.cases import cases
from bench.static_analysis.compiled import RESULTS, faults_of, from_json, measure_all, to_json


def main() -> int:
    """Compile everything, write both files, print every fault and return the exit status."""
    records = measure_all(cases())
    text = to_json(records)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "compiled.json").write_text(text)
    (RESULTS / "compiled.md").write_text(table.render(*from_json(text)))
    found = [(case, fault) for case in cases() for fault in faults_of(case, records[str(case)])]
    for case, fault in found:
        print(f"{case}: {fault}")
    print(f"{len(records)} compilations in {RESULTS / 'compiled.md'}, {len(found)} faults")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
