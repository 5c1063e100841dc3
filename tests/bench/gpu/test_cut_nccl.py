"""A library that is left with one architecture's code, on an ELF that the C compiler links."""

from __future__ import annotations

import ctypes
import gzip
import os
import re
import shutil
import struct
import subprocess
from pathlib import Path

import pytest

from bench.gpu import cut_nccl

COMPILER = shutil.which(os.environ.get("CC", "cc"))
MACHINE, PTX = 2, 1
# Kind, architecture and code; 16 bytes more of header where code is compressed.
FIRST = [(MACHINE, 75, b"seven"), (MACHINE, 90, b"ninety"), (PTX, 90, b"ptx of ninety")]
SECOND = [(MACHINE, 90, b"another ninety"), (MACHINE, 100, b"hundred"), (MACHINE, 103, b"more")]


def fatbin(codes: list[tuple[int, int, bytes]]) -> bytes:
    """What CUDA's fatbinary makes of one compilation's code."""
    parts = []
    for kind, architecture, text in codes:
        header = 64 + 16 * (architecture > 90)
        padded = text.ljust(-(-len(text) // 8) * 8, b"\0")
        head = struct.pack("<HHIQ12xI", kind, 0x101, header, len(padded), architecture)
        parts.append(head.ljust(header, b"\1") + padded)
    behind = b"".join(parts)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(behind)) + behind


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if COMPILER is None:
        pytest.skip("there is no C compiler")
    folder = tmp_path_factory.mktemp("library")
    # With a hole between the two, as the linker leaves it.
    (folder / "codes").write_bytes(fatbin(FIRST) + bytes(24) + fatbin(SECOND))
    (folder / "unlinked").write_bytes(b"for a device linker")
    (folder / "library.c").write_text(
        f"""
        __asm__(".section .nv_fatbin,\\"a\\"\\n.balign 8\\n.incbin \\"{folder}/codes\\"\\n"
                ".section __nv_relfatbin,\\"a\\"\\n.incbin \\"{folder}/unlinked\\"\\n.text");
        int answer(void) {{ int debugged = 42; return debugged; }}
        """
    )
    made = folder / "libmade.so"
    command = [COMPILER, "-shared", "-fPIC", "-g", "-o", made, folder / "library.c"]
    subprocess.run(command, check=True)
    return made


def test_library_keeps_the_code_of_one_architecture_and_still_works(library, tmp_path):
    packed = tmp_path / "cut.so.gz"
    assert cut_nccl.main([str(library), "--arch", "90", "-o", str(packed)]) == 0
    made = cut_nccl.unpacked(packed)
    assert made == tmp_path / "cut.so" and cut_nccl.unpacked(made) == made
    left, whole = made.read_bytes(), library.read_bytes()
    assert len(left) == len(whole)
    assert b"ninety" in left and b"another ninety" in left
    for gone in (b"seven", b"ptx of", b"hundred", b"more", b"for a device linker", b"debugged"):
        assert gone in whole and gone not in left
    # The headers stay, by which CUDA finds its way.
    assert left.count(struct.pack("<I", 0xBA55ED50)) == 2
    assert ctypes.CDLL(str(made)).answer() == 42
    # What is compressed is the same on another day.
    again = tmp_path / "again.gz"
    cut_nccl.main([str(library), "--arch", "90", "-o", str(again)])
    assert again.read_bytes() == packed.read_bytes()
    assert gzip.decompress(packed.read_bytes()) == left


def test_code_of_an_older_chip_of_the_same_kind_is_kept(library):
    left = cut_nccl.cut(library.read_bytes(), 103)
    assert b"hundred" in left and b"more" in left and b"ninety" not in left
    assert b"more" not in cut_nccl.cut(library.read_bytes(), 100)


def test_what_cannot_be_cut_is_said(library, tmp_path, capsys):
    with pytest.raises(ValueError, match=re.escape("no code for sm_80, but for 75, 90, 100, 103")):
        cut_nccl.cut(library.read_bytes(), 80)
    with pytest.raises(ValueError, match="no ELF of 64 bits"):
        cut_nccl.cut(b"#!/bin/sh", 90)
    without = re.sub(rb"\.nv_fatbin", b".no_fatbin", library.read_bytes())
    with pytest.raises(ValueError, match=r"no section \.nv_fatbin"):
        cut_nccl.cut(without, 90)
    with pytest.raises(SystemExit):
        cut_nccl.main([str(tmp_path / "absent"), "--arch", "90"])
    assert "absent" in capsys.readouterr().err
