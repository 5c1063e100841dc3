"""How the compiled functions come to be: the cache, its folders, compilers and reasons."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import kernels
from kernels.cpu import build, dispatch, native
from tests.kernels.cpu.cases import works


def script(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


class Small:
    """A library that is compiled in no time, in a cache that this user alone can write to."""

    def __init__(self, folder: Path) -> None:
        self.cache = folder / "home" / "adasum"
        self._source = folder / "small.c"
        self._source.write_text("int answer(void) { return 42; }")

    def works(self, load: Callable[[str], Any] = ctypes.CDLL) -> bool:
        """Build it, or find it; whether it does what it should."""
        loaded = build.built("small", [self._source], {}, [], lambda path: load(str(path)))
        return bool(loaded.answer() == 42)

    def files(self) -> dict[Path, int]:
        """Return what the cache has, with what tells a file from another of the same name."""
        return {path: path.lstat().st_ino for path in self.cache.iterdir()}


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Small:
    if not (shutil.which("gcc") or shutil.which("cc") or shutil.which("clang")):
        pytest.skip("no C compiler on the PATH")
    monkeypatch.delenv("CC", raising=False)
    (tmp_path / "home").mkdir(mode=0o700)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    return Small(tmp_path)


def test_it_is_compiled_once(library: Path) -> None:
    """Another process finds what this one has compiled, and leaves it as it is."""
    folder, before = library.parent, library.stat()
    assert library.name.startswith("native-") and stat.S_IMODE(folder.stat().st_mode) == 0o700
    code = "import kernels; print(kernels.backend_info().cpu_path)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env={**os.environ, "XDG_CACHE_HOME": str(folder.parent), "ADASUM_CPU_KERNELS": ""},
    )
    assert done.stdout.strip() == "compiled"
    after = {path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in folder.iterdir()}
    assert after == {library: (before.st_ino, before.st_mtime_ns)}


def rewrite(path: Path, content: bytes) -> None:
    """Put another file in the place of one that is loaded, whose memory must not change."""
    path.unlink()
    path.write_bytes(content)
    path.chmod(0o600)


def cut(whole: bytes) -> bytes:
    return whole[: len(whole) // 2]


def zero_a_page(whole: bytes) -> bytes:
    return whole[:4096] + bytes(4096) + whole[8192:]


@pytest.mark.parametrize("damage", [cut, zero_a_page, lambda whole: b"", lambda whole: whole[:100]])
def test_what_is_damaged_is_made_anew(small: Small, damage: Callable[[bytes], bytes]) -> None:
    """Loading it could end the process."""
    assert small.works()
    (path,) = small.files()
    whole = path.read_bytes()
    rewrite(path, damage(whole))
    assert small.works()
    assert path.stat().st_size == len(whole)


def test_file_that_others_may_write_to_is_made_anew(small: Small) -> None:
    assert small.works()
    (path,) = old = small.files()
    path.chmod(0o777)
    assert small.works()
    assert small.files().keys() == old.keys() and small.files() != old


def test_library_under_a_group_umask_is_compiled_once(small: Small) -> None:
    """As with Debian's other usual umask: what others may write to is not loaded."""
    before = os.umask(0o002)
    try:
        assert small.works()
        old = small.files()
        assert small.works()
    finally:
        os.umask(before)
    assert small.files() == old and len(old) == 1


def test_what_is_there_needs_no_compiler(small: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    assert small.works()
    monkeypatch.setenv("PATH", str(small.cache))
    assert small.works()
    shutil.rmtree(small.cache)
    with pytest.raises(build.Unavailable, match="a C compiler is not on the PATH"):
        small.works()


def test_cache_on_a_full_disk_is_done_without(
    small: Small, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(build.os, "fsync", full)
    assert small.works() and not small.files()


def test_folder_that_others_may_write_to_is_not_used(small: Small) -> None:
    small.cache.mkdir()
    small.cache.chmod(0o777)
    assert small.works() and not small.files()


@pytest.mark.parametrize("change", ["mode", "owner"])
def test_parent_that_is_not_the_users_alone_is_not_trusted(small: Small, change: str) -> None:
    """Others could put a folder of theirs in the place of the user's."""
    assert small.works()
    (path,) = small.files()
    content = b"planted"
    rewrite(path, content)
    if change == "mode":
        small.cache.parent.chmod(0o777)
    elif os.geteuid() == 0:
        os.chown(small.cache.parent, 65534, -1)
    else:
        pytest.skip("only root can give a folder to another user")
    assert small.works()
    assert path.read_bytes() == content


def test_parent_where_only_owners_may_rename_is_trusted(small: Small) -> None:
    small.cache.parent.chmod(0o1777)
    assert small.works() and len(small.files()) == 1


def test_link_in_place_of_the_library_is_not_followed(small: Small, tmp_path: Path) -> None:
    assert small.works()
    (library,) = small.files()
    elsewhere = library.rename(tmp_path / "elsewhere.so")
    library.symlink_to(elsewhere)
    assert small.works()
    assert not library.is_symlink()


def test_file_that_is_replaced_after_its_check_is_not_what_is_loaded(small: Small) -> None:
    assert small.works()
    ((library, checked),) = small.files().items()

    def load(path: str) -> ctypes.CDLL:
        library.unlink()
        library.write_bytes(b"not what was checked")
        assert os.stat(path).st_ino == checked
        return ctypes.CDLL(path)

    assert small.works(load)


def test_each_compiler_has_a_library_of_its_own(
    small: Small, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert small.works()
    first = small.files()
    compiler = shutil.which("gcc") or shutil.which("cc") or shutil.which("clang")
    monkeypatch.setenv("CC", f"{compiler} -g")
    assert small.works()
    assert len(small.files()) == 2 and first.items() < small.files().items()


def test_compiler_named_by_a_relative_path_is_found(
    small: Small, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script(tmp_path / "mine", 'exec cc "$@"')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CC", "./mine")
    assert small.works()


def test_file_system_that_forbids_to_run_is_loaded_from_memory(small: Small) -> None:
    assert small.works()
    old = small.files()
    tried = []

    def load(path: str) -> ctypes.CDLL:
        tried.append(os.readlink(path).partition(":")[0])
        if tried[-1] != "/memfd":
            raise OSError("failed to map segment from shared object")
        return ctypes.CDLL(path)

    assert small.works(load)
    assert len(tried) == 2 and tried[1] == "/memfd"
    assert small.files() == old


def test_library_that_does_not_load_is_compiled_anew(small: Small) -> None:
    assert small.works()
    (library,) = small.files()
    content = b"of another processor"
    rewrite(library, content + hashlib.sha256(content).digest())
    assert small.works()
    assert library.stat().st_size > 1000


@pytest.mark.parametrize("home", ["/dev/null", "relative"])
def test_home_that_is_no_folder_is_done_without(
    small: Small, monkeypatch: pytest.MonkeyPatch, home: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", home)
    assert small.works()
    assert not Path("relative").exists()


@pytest.mark.usefixtures("library", "fresh")
def test_no_folder_for_temporary_files_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/dev/null")
    assert kernels.backend_info().cpu_path.startswith("torch: native.c could not be compiled")
    assert works()


@pytest.mark.parametrize(
    ("compiler", "reason"),
    [
        ("", "a C compiler is not on the PATH: install gcc"),
        ('no-such-compiler "', "$CC is no command: No closing quotation"),
        ("no-such-compiler -O1", "$CC, no-such-compiler, is not on the PATH"),
        ("echo what; exit 3", "failed: exit status 3"),
        ("echo what >&2; exit 3", "failed: what"),
        ("sleep 30", "took over 0 s"),
        ("exit 0", "could not be compiled and loaded"),
        ("printf 'caf\\351' >&2; exit 3", "failed: caf\ufffd"),
    ],
)
def test_torch_takes_over(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, compiler: str, reason: str
) -> None:
    monkeypatch.setattr(native, "_flags_here", lambda: ())
    monkeypatch.setattr(build, "_SECONDS", 0.3)
    if compiler.startswith("no-such"):
        monkeypatch.setenv("CC", compiler)
    elif compiler:
        # With an argument of its own, as "ccache gcc" has.
        path = fresh.parent.parent / "compiler"
        monkeypatch.setenv("CC", f"{script(path, compiler)} -pipe")
    else:
        monkeypatch.delenv("CC", raising=False)
        monkeypatch.setenv("PATH", str(fresh))
    assert (
        kernels.backend_info().cpu_path.startswith("torch: ")
        and reason in kernels.backend_info().cpu_path
    )
    assert works()
    assert not (fresh.exists() and list(fresh.iterdir()))
    monkeypatch.setattr(dispatch, "_state", dispatch._State())
    monkeypatch.setenv("ADASUM_CPU_KERNELS", "native")
    with pytest.raises(RuntimeError, match="ADASUM_CPU_KERNELS=native: "):
        works()


def test_without_its_source(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_SOURCES", [fresh / "native.c"])
    monkeypatch.setattr(native, "_flags_here", lambda: ())
    assert "native.c could not be compiled" in kernels.backend_info().cpu_path and works()
