"""C code compiled at first use, as Triton does for its launchers, and kept in the user's cache.

What lies in the cache is run, so nobody else may have put it there. Whoever can rename a folder can
put another in its place: every folder from the root down is checked, then opened from the one
above. A file is opened once, and what was hashed is what is loaded.
"""

from __future__ import annotations

import grp
import hashlib
import os
import platform
import pwd
import secrets
import shlex
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
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
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


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
        stem: Begins the file's name, which changes with all that is compiled and with the compiler.
        sources: The C file and the headers beside it.
        generated: Headers that are no files, their text by their name.
        flags: For the compiler, beside those that are the same everywhere.
        load: Raises OSError, AttributeError or ValueError where the file cannot be loaded.

    Raises:
        Unavailable: There is no compiler, or it failed, or its file cannot be loaded.
    """
    try:
        texts = {path.name: path.read_bytes() for path in sources}
        texts |= {header: text.encode() for header, text in generated.items()}
        key = f"{stem}-{_hash(sorted(texts.items()), _FLAGS, flags, platform.machine())}-"
        compiler, missing = _compiler()
        name = f"{key}{_identity(compiler)}.so" if compiler else ""
        with _cache() as cache:
            # Without a compiler, what any other has made will do.
            kept = [name] if compiler else _names(cache, key)
            for one in kept:
                with suppress(OSError, AttributeError, ValueError):
                    return _load_kept(cache, one, load)
            if missing:
                raise Unavailable(missing)
            content = _compile([*compiler, *_FLAGS, *flags], sources[0].name, texts)
            with suppress(OSError):
                _keep(cache, name, content)
                return _load_kept(cache, name, load)
        return _load_copy(content, load)
    except (OSError, AttributeError, ValueError) as error:
        raise Unavailable(f"{sources[0].name} could not be compiled and loaded: {error}") from error


def _hash(*values: object) -> str:
    return hashlib.sha256(repr(values).encode()).hexdigest()[:24]


def _compiler() -> tuple[list[str], str]:
    """The command that $CC names, else the first of the usual ones; or why there is none."""
    try:
        named = shlex.split(os.environ.get("CC", ""))
    except ValueError as error:
        return [], f"$CC is no command: {error}"
    for first, *options in [named] if named else [["gcc"], ["cc"], ["clang"]]:
        if found := shutil.which(first):
            return [os.path.abspath(found), *options], ""
    wanted = f"$CC, {named[0]}," if named else "a C compiler"
    return [], f"{wanted} is not on the PATH: install gcc"


def _identity(compiler: list[str]) -> str:
    """What changes with the compiler; to ask for its version takes as long as a small build."""
    path = os.path.realpath(compiler[0])
    info = os.stat(path)
    return _hash(path, info.st_size, info.st_mtime_ns, compiler[1:])[:12]


def _compile(command: list[str], source: str, texts: Mapping[str, bytes]) -> bytes:
    """Return the library that the command makes of the texts."""
    with tempfile.TemporaryDirectory(prefix="adasum-") as private, _opened(private) as folder:
        for name, text in texts.items():
            with open(name, "xb", opener=_inside(folder)) as file:
                file.write(text)
        _run([*command, source, "-o", "made.so"], folder)
        with open("made.so", "rb", opener=_inside(folder)) as file:
            return file.read()


def _run(command: list[str], folder: int) -> None:
    """Run it in a folder, where its temporary files go too: no path of it can be replaced."""
    try:
        subprocess.run(
            command,
            check=True,
            capture_output=True,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            timeout=_SECONDS,
            cwd=f"/proc/self/fd/{folder}",
            env={**os.environ, "TMPDIR": "."},
        )
    except subprocess.TimeoutExpired as error:
        raise Unavailable(f"{command[0]} took over {_SECONDS:.0f} s") from error
    except subprocess.CalledProcessError as error:
        lines = error.stderr.strip().splitlines() or [f"exit status {error.returncode}"]
        said = next((line for line in lines if "error" in line), lines[0])
        raise Unavailable(f"{command[0]} failed: {said}") from error


@contextmanager
def _opened(path: str) -> Iterator[int]:
    """Yield a descriptor of this user's own folder."""
    folder = os.open(path, _FOLDER)
    try:
        if not _is_mine(os.fstat(folder)):
            raise OSError(f"{path} is not this user's alone")
        yield folder
    finally:
        os.close(folder)


def _inside(folder: int) -> Callable[[str, int], int]:
    def opener(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NOFOLLOW, 0o600, dir_fd=folder)

    return opener


@contextmanager
def _cache() -> Iterator[int | None]:
    """Yield the cache's descriptor; None where others could change it, or there is none."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    path = Path(base, "adasum")
    folder = None
    with suppress(OSError):
        if path.is_absolute():
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            folder = _open_from_root(path)
    try:
        yield folder
    finally:
        if folder is not None:
            os.close(folder)


def _open_from_root(path: Path) -> int | None:
    """Open a folder of this user's own that nobody else can replace by another."""
    # A link that only root or this user could have made may be followed, and is, to where it leads.
    _, *names = Path(os.path.realpath(path)).parts
    folder = os.open("/", _FOLDER)
    for name in names:
        above = folder
        try:
            if not _holds_its_entries(os.fstat(above)):
                return None
            folder = os.open(name, _FOLDER, dir_fd=above)
        finally:
            os.close(above)
    if _is_mine(os.fstat(folder)):
        return folder
    os.close(folder)
    return None


def _holds_its_entries(info: os.stat_result) -> bool:
    """Whether only root and this user can rename what this folder has of theirs."""
    if info.st_uid not in (0, os.geteuid()):
        return False
    return not _others_write(info) or bool(info.st_mode & stat.S_ISVTX)


def _is_mine(info: os.stat_result) -> bool:
    return info.st_uid == os.geteuid() and not info.st_mode & _OTHERS_WRITE


def _others_write(info: os.stat_result) -> bool:
    if not info.st_mode & stat.S_IWGRP or info.st_mode & stat.S_IWOTH:
        return bool(info.st_mode & _OTHERS_WRITE)
    # Where each user has a group alone, folders are usually made so that it may write to them.
    with suppress(KeyError):
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(info.st_gid)
        alone = set(group.gr_mem) <= {user.pw_name}
        return not (group.gr_gid == user.pw_gid and group.gr_name == user.pw_name and alone)
    return True


def _names(cache: int | None, start: str) -> list[str]:
    names = [] if cache is None else os.listdir(cache)
    return sorted(name for name in names if name.startswith(start) and name.endswith(".so"))


def _keep(cache: int | None, name: str, content: bytes) -> None:
    """Write it with its hash, which loading does not look at; it takes its name when whole."""
    if cache is None:
        raise OSError("there is no cache")
    draft = f"{name}.{secrets.token_hex(8)}"
    try:
        with open(draft, "xb", opener=_inside(cache)) as file:
            file.write(content + hashlib.sha256(content).digest())
            file.flush()
            os.fsync(file.fileno())
        os.rename(draft, name, src_dir_fd=cache, dst_dir_fd=cache)
    except OSError:
        with suppress(OSError):
            os.unlink(draft, dir_fd=cache)
        raise


def _load_kept(cache: int | None, name: str, load: Callable[[Path], Loaded]) -> Loaded:
    """Load what `_keep` wrote. Raises OSError where it is not whole, or not this user's alone."""
    if cache is None:
        raise OSError("there is no cache")
    with open(name, "rb", opener=_inside(cache)) as file:
        if not _is_mine(os.fstat(file.fileno())):
            raise OSError(f"others may write to {name}")
        content = file.read()
        # Loading what is cut short ends the process.
        if hashlib.sha256(content[:-32]).digest() != content[-32:]:
            raise OSError(f"{name} is not whole")
        try:
            return _load_open(os.dup(file.fileno()), load)
        except OSError:
            # Its file system may forbid to run what lies on it.
            return _load_copy(content, load)


def _load_copy(content: bytes, load: Callable[[Path], Loaded]) -> Loaded:
    """Load it from memory."""
    copy = os.memfd_create("compiled")
    with open(copy, "wb", closefd=False) as file:
        file.write(content)
    return _load_open(copy, load)


def _load_open(descriptor: int, load: Callable[[Path], Loaded]) -> Loaded:
    """Load a file by its descriptor, which stays open while it is loaded.

    The system's loader takes a name that it has seen before for the same library, so the number
    must not become another file's.
    """
    try:
        return load(Path(f"/proc/self/fd/{descriptor}"))
    except OSError:
        os.close(descriptor)
        raise
