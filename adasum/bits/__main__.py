"""Print the facts that the bits of a training run depended on: `python -m adasum.bits FILE`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from adasum.bits import __doc__ as about
from adasum.bits import torch_facts

_ABSENT = "not said"


def lines_of(bits: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Return the facts of a training run as lines of text, and mark the ones that differ here."""
    lines = ["gradients are reduced:"]
    lines += [f"  {name:26} {value}" for name, value in bits["reduction"].items()]
    lines.append("the model's own bits, which are torch's, depend on:")
    here = torch_facts()
    for name in dict.fromkeys([*bits["torch"], *here]):
        was, now = bits["torch"].get(name, _ABSENT), here.get(name, _ABSENT)
        lines.append(f"  {name:26} {was}" + ("" if was == now else f"      HERE: {now}"))
    lines.append("and on seeds, the order of the data, and the contents of each micro-batch")
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the facts in a file; return 1 if torch's differ here. Bad input exits with 2."""
    parser = argparse.ArgumentParser(prog="python -m adasum.bits", description=about)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("file", type=Path, help="result of bits_of, as JSON")
    given = parser.parse_args(arguments)
    try:
        bits = json.loads(given.file.read_text())
    except (OSError, ValueError) as error:
        parser.error(f"cannot read {given.file}: {error}")
    if not isinstance(bits, dict) or not {"reduction", "torch"} <= bits.keys():
        parser.error(f"{given.file} is not what bits_of returned: write json.dumps of that")
    lines = lines_of(bits)
    sys.stdout.write("\n".join([*lines, ""]))
    return int(any("HERE: " in line for line in lines))


if __name__ == "__main__":
    sys.exit(main())
