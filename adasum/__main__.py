"""The command `adasum`, also as `python -m adasum`: all commands of the packages by one name.

    adasum check                        # what works on this machine
    adasum schedules draw xring#2 8     # the same as python -m collectives.schedules draw xring#2 8

Each command is also a module that `python -m` can run.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence

_COMMANDS = {
    "check": ("adasum.check", "what is installed on this machine, and what works"),
    "demo": ("adasum.demo", "one hash on 8, 4 and 2 ranks; a lost rank named; curves"),
    "bench": ("collectives.bench", "time collectives, with nccl-tests' flags"),
    "schedules": ("collectives.schedules", "draw, list, price and verify a schedule"),
    "cost": ("collectives.cost", "estimate the time of algorithms on links that you name"),
    "flight": ("collectives.flight", "join flight records and name the rank at fault"),
    "bits": ("adasum.bits", "what the bits of a training depended on"),
}
_USAGE = "\n".join(
    [
        "usage: adasum COMMAND ...    (adasum COMMAND --help tells its arguments)",
        "",
        *(f"  {name:10} {does} (python -m {module})" for name, (module, does) in _COMMANDS.items()),
    ]
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command's module as `python -m` does; without a command, print the list of commands."""
    name, *rest = [*(sys.argv[1:] if argv is None else argv)] or ["--help"]
    if name in ("-h", "--help"):
        print(_USAGE)
        return 0
    if name not in _COMMANDS:
        print(f"{_USAGE}\n\nadasum: no command {name!r}", file=sys.stderr)
        return 2
    sys.argv = [f"adasum {name}", *rest]
    runpy.run_module(_COMMANDS[name][0], run_name="__main__", alter_sys=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
