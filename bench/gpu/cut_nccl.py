"""Leave of a libnccl.so.2 what one architecture runs: 14 MB of 252, where little can be brought.

    python -m bench.gpu.cut_nccl .../libnccl.so.2 --arch 90 -o libnccl.so.2.gz
    python -m bench.gpu --nccl libnccl.so.2.gz

Everything stays where it is; what no such GPU reads is zeros, which take no room once compressed:
machine code of other architectures, PTX, what a device linker would read, what a debugger would.
The layout is that of ELF and, of the section .nv_fatbin, that of CUDA's fatbinary_section.h.
"""

from __future__ import annotations

import argparse
import gzip
import struct
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from bench.provenance import unfinished

# Of a section: its name's place, flags, place in the file and bytes.
_SECTION = struct.Struct("<I4xQ8xQQ24x")
_IN_MEMORY = 2
_FATBIN, _UNLINKED = ".nv_fatbin", "__nv_relfatbin"
# Of one compilation's code: magic, version, bytes of this header, bytes behind it.
_CODES = struct.Struct("<IHHQ")
_MAGIC = 0xBA55ED50
# Of one architecture's: kind, version, bytes of this header, bytes behind it, the architecture.
_CODE = struct.Struct("<HHIQ12xI")
_MACHINE_CODE = 2


class Code(NamedTuple):
    """The code of one architecture, one of several of a compilation."""

    start: int
    stop: int
    architecture: int
    machine: bool

    def runs_on(self, architecture: int) -> bool:
        """Whether a GPU of this architecture may load it without compiling it."""
        same = self.architecture // 10 == architecture // 10
        return self.machine and same and self.architecture <= architecture


def cut(library: bytes, architecture: int) -> bytearray:
    """Return a library of the same size that has one architecture's code.

    ValueError: it is no ELF of 64 bits, or has no code that this architecture runs.
    """
    sections = _sections(library)
    if _FATBIN not in sections:
        raise ValueError(f"there is no section {_FATBIN}: no library with code for GPUs")
    codes = [*_codes(library, *sections[_FATBIN][1:])]
    kept = {code for code in codes if code.runs_on(architecture)}
    if not kept:
        others = sorted({code.architecture for code in codes if code.machine})
        raise ValueError(f"no code for sm_{architecture}, but for {', '.join(map(str, others))}")
    unread = [code[:2] for code in codes if code not in kept]
    for name, (flags, start, size) in sections.items():
        if name == _UNLINKED or (name.startswith(".debug") and not flags & _IN_MEMORY):
            unread.append((start, start + size))
    left = bytearray(library)
    for start, stop in unread:
        left[start:stop] = bytes(stop - start)
    return left


def _sections(library: bytes) -> dict[str, tuple[int, int, int]]:
    """Return (flags, place, bytes) of each section of an ELF by its name."""
    if library[:6] != b"\x7fELF\x02\x01":
        raise ValueError("it is no ELF of 64 bits")
    (first,) = struct.unpack_from("<Q", library, 0x28)
    each, count, of_names = struct.unpack_from("<HHH", library, 0x3A)
    found = [_SECTION.unpack_from(library, first + each * k) for k in range(count)]
    names = found[of_names][2]

    def name(place: int) -> str:
        return library[names + place : library.index(b"\0", names + place)].decode()

    return {name(place): section for place, *section in found}  # type: ignore[misc]


def _codes(library: bytes, start: int, size: int) -> Iterator[Code]:
    """Yield the code of every compilation and architecture in a section."""
    place, end = start, start + size
    while place < end:
        magic, _, header, behind = _CODES.unpack_from(library, place)
        if magic != _MAGIC:
            # Each begins at a multiple of 8.
            place += 8
            continue
        place += header
        stop = place + behind
        while place < stop:
            kind, _, header, behind, architecture = _CODE.unpack_from(library, place)
            begin, place = place + header, place + header + behind
            yield Code(begin, place, architecture, kind == _MACHINE_CODE)


def unpacked(library: Path) -> Path:
    """Return the library's path; where it is compressed, of what is then beside it."""
    if library.suffix != ".gz":
        return library
    whole = library.with_suffix("")
    part = unfinished(whole)
    part.write_bytes(gzip.decompress(library.read_bytes()))
    return part.replace(whole)


def main(argv: Sequence[str] | None = None) -> int:
    """Write the compressed library; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu.cut_nccl",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("library", type=Path, help="libnccl.so.2, of a wheel nvidia-nccl-cu13, say")
    parser.add_argument("--arch", type=int, required=True, help="90 for sm_90, an H100 or H200")
    parser.add_argument("-o", "--output", type=Path, default=Path("libnccl.so.2.gz"))
    given = parser.parse_args(argv)
    try:
        left = cut(given.library.read_bytes(), given.arch)
    except (OSError, ValueError) as error:
        parser.error(f"{given.library}: {error}")
    given.output.write_bytes(gzip.compress(left, mtime=0))
    print(f"{given.output}: {given.output.stat().st_size / 1e6:.1f} MB for {len(left) / 1e6:.1f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
