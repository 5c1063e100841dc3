"""C code compiled at first use, as Triton does for its launchers, and kept in the user's cache."""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

Loaded = TypeVar("Loaded")
# The same everywhere, whatever $CC says beside the compiler's name.
_FLAGS = (
    *("-std=gnu11", "-fPIC", "-shared", "-ffp-contract=off"),
    # Without the first two gcc may link what has the whole process flush subnormal numbers to zero.
    # To clang 14 the second means exact exceptions, so no vectors, and the third that none matter.
    *("-fno-fast-math", "-fno-unsafe-math-optimizations", "-fno-trapping-math"),
)
_SECONDS = 60.0


class Unavailable(Exception):
    """Why something is not compiled."""


def built(
    stem: str,
    sources: Sequence[Path],
    generated: Mapping[str, str],
    flags: Sequence[str],
    load: Callable[[Path], Loaded],
) -> Loaded:
    """Return what `load` makes of sources[0], compiled, from the cache or now.

    Args:
        stem: Begins the file's name, which changes with all that is compiled.
        sources: The C file and the headers beside it.
        generated: Headers that are no files, their text by their name.
        flags: For the compiler, beside those that are the same everywhere.
        load: Raises OSError, AttributeError or ValueError where the file cannot be loaded.

    Raises:
        Unavailable: There is no compiler, or it failed, or its file cannot be loaded.
    """
    try:
        texts = [path.read_bytes() for path in sources]
        made_by = texts, sorted(generated.items()), _FLAGS, flags, platform.machine()
        key = hashlib.sha256(repr(made_by).encode()).hexdigest()
        name = f"{stem}-{key[:24]}.so"
        folder = _cache()
        if folder is not None and _is_whole(folder / name):
            return load(folder / name)
        compiler = _compiler()
        # Takes its name when it is whole: other processes do the same at the same time.
        shared = folder if folder is not None and os.access(folder, os.W_OK) else None
        with tempfile.TemporaryDirectory(prefix="adasum-", dir=shared) as private:
            made = Path(private, name)
            for header, text in generated.items():
                Path(private, header).write_text(text)
            _run([*compiler, *_FLAGS, *flags, f"-I{private}", str(sources[0]), "-o", str(made)])
            _seal(made)
            loaded = load(made)
            if shared is not None:
                made.replace(shared / name)
            return loaded
    except (OSError, AttributeError, ValueError) as error:
        raise Unavailable(f"{sources[0].name} could not be compiled and loaded: {error}") from error


def _seal(path: Path) -> None:
    """Append a hash of what is there, which loading does not look at, and have it on the disk.

    And let nobody else write to it, as the compiler may.
    """
    path.chmod(0o700)
    with path.open("r+b") as file:
        seal = hashlib.sha256(file.read()).digest()
        file.write(seal)
        file.flush()
        os.fsync(file.fileno())


def _is_whole(path: Path) -> bool:
    """Whether it is as `_seal` left it, and nobody else's: what is cut short ends the process."""
    try:
        if not _is_mine(path):
            return False
        content = path.read_bytes()
    except OSError:
        return False
    return hashlib.sha256(content[:-32]).digest() == content[-32:]


def _compiler() -> list[str]:
    """The command that $CC names, else the first of the usual ones."""
    try:
        named = shlex.split(os.environ.get("CC", ""))
    except ValueError as error:
        raise Unavailable(f"$CC is no command: {error}") from error
    for command in [named] if named else [["gcc"], ["cc"], ["clang"]]:
        if shutil.which(command[0]):
            return command
    wanted = f"$CC, {named[0]}," if named else "a C compiler"
    raise Unavailable(f"{wanted} is not on the PATH: install gcc")


def _run(command: list[str]) -> None:
    try:
        subprocess.run(
            command,
            check=True,
            capture_output=True,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            timeout=_SECONDS,
        )
    except subprocess.TimeoutExpired as error:
        raise Unavailable(f"{command[0]} took over {_SECONDS:.0f} s") from error
    except subprocess.CalledProcessError as error:
        lines = error.stderr.strip().splitlines() or [f"exit status {error.returncode}"]
        said = next((line for line in lines if "error" in line), lines[0])
        raise Unavailable(f"{command[0]} failed: {said}") from error


def _cache() -> Path | None:
    """A folder that only this user can write to; None where there is none.

    What lies there is loaded, so it may not be put there by others.
    """
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = Path(base, "adasum")
    if not folder.is_absolute():
        return None
    try:
        if not folder.exists():
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return folder if _is_mine(folder) else None
    except OSError:
        return None


def _is_mine(path: Path) -> bool:
    info = path.stat()
    return info.st_uid == os.geteuid() and not info.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
