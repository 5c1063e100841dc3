"""Compare what collectives answer with a table of what they answered, bit for bit.

    python -m tests.frozen

from the root of this repository: values as hashes, and the texts of errors, of a seeded sample of
operators, algorithms, dtypes, sizes, transports and ranks, in about two minutes on two idle cores.
It lists every difference and ends with status 1 if there is one. A change that is meant goes into
the table with `--update`, and its list into the note of what has changed. The C kernels and torch's
functions take other dot products: where not those compute that the table was made with, Adasum's
values are left out.
"""

from __future__ import annotations

import argparse
import time

from tests.frozen import call_path, public_names, table


def _compare(args: argparse.Namespace) -> int:
    held = table.read()
    cases = table.chosen(held, args.sample, args.seed)
    found = table.run(cases, minutes=args.minutes, say=table.say)
    different = table.differences(held, found)
    print("\n".join(different))
    print(
        f"{len(found)} of the table's {len(held.outcomes)} cases were compared, with "
        f"{table.backend()} kernels (the table: {held.made['backend']}): {len(different)} differ"
    )
    if args.update:
        table.write(table.Table(held.made, held.outcomes | found))
    return 1 if different and not args.update else 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.frozen", description=__doc__)
    parser.add_argument("--update", action="store_true", help="write what differs to the table")
    parser.add_argument("--names", action="store_true", help="write the list of public names anew")
    parser.add_argument("--trace", action="store_true", help="print the way of a call, traced")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--sample", type=int, help="how many cases; else all of the table")
    parser.add_argument("--minutes", type=float, help="begin no more ranks after so long")
    args = parser.parse_args()
    start = time.monotonic()
    status = 0
    if args.trace:
        call_path.show()
    elif args.names:
        public_names.PATH.write_text(public_names.listed())
    else:
        status = _compare(args)
    print(f"{time.monotonic() - start:.0f} s")
    return status


if __name__ == "__main__":
    raise SystemExit(main())
