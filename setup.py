"""The C kernels, and the README as PyPI can show it; all else is in pyproject.toml.

PyPI resolves no relative links and no relative pictures: they become absolute where
`project.urls` names the repository as `Source`, else links become their text and pictures go.
"""

from __future__ import annotations

import hashlib
import platform
import re
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent
SOURCE = re.search(r'^Source = "(.*)"', (ROOT / "pyproject.toml").read_text(), re.M)
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?![a-z]+:|#)([^)\s]+)\)")
C_FILES = sorted((ROOT / "kernels" / "cpu").glob("*.[ch]"))
# What $CFLAGS and the flags of Python's own build say comes before these. Where gcc links, the
# first two keep out what has the whole process flush subnormal numbers to zero.
MATH = ["-fno-fast-math", "-fno-unsafe-math-optimizations"]
FLAGS = [
    *("-std=gnu11", "-O3", "-funroll-loops", "-ffp-contract=off", *MATH),
    # To clang 14 the last of MATH means exact exceptions, so no vectors; this, that none matter.
    "-fno-trapping-math",
    # What is written as floats is looked at as integers.
    "-fno-strict-aliasing",
    # It would hold the path of the folder that it was compiled in.
    "-g0",
]
# kernels/cpu/native.py looks whether the processor has them.
PROCESSORS = {
    "x86_64": ["-march=x86-64", "-mavx2", "-mfma", "-mf16c"],
    "aarch64": ["-march=armv8-a"],
}


def compiled_from() -> str:
    """The hash of the C files, as kernels/cpu/native.py takes it."""
    return hashlib.sha256(b"".join(path.read_bytes() for path in C_FILES)).hexdigest()


def libraries() -> list[Extension]:
    """What is compiled for this machine. Where that fails, torch's functions serve."""
    if platform.system() != "Linux" or platform.machine() not in PROCESSORS:
        return []
    sources = [path.relative_to(ROOT).as_posix() for path in C_FILES]
    native = Extension(
        "kernels.cpu.libnative",
        [path for path in sources if path.endswith(".c")],
        depends=[*sources, "setup.py"],
        define_macros=[("COMPILED_FROM", f'"{compiled_from()}"')],
        extra_compile_args=[*FLAGS, *PROCESSORS[platform.machine()]],
        extra_link_args=MATH,
        optional=True,
    )
    return [native]


class BuildLibrary(build_ext):
    """Name the library as one that is no module and fits any Python: ctypes loads it."""

    def get_ext_filename(self, fullname: str) -> str:
        """Return the path that it is installed as."""
        return fullname.replace(".", "/") + ".so"


class Wheel(bdist_wheel):
    """A wheel for any Python on this platform."""

    def get_tag(self) -> tuple[str, str, str]:
        """Return what of Python, of its ABI and of the platform it needs."""
        return "py3", "none", super().get_tag()[2]


def on_pypi(match: re.Match[str]) -> str:
    """Return what becomes of a relative link or picture."""
    picture, text, target = match.groups()
    if SOURCE:
        return f"{picture}[{text}]({SOURCE[1]}/{'raw' if picture else 'blob'}/main/{target})"
    return "" if picture else text


if __name__ == "__main__":
    setup(
        ext_modules=libraries(),
        cmdclass={"build_ext": BuildLibrary, "bdist_wheel": Wheel},
        long_description=LINK.sub(on_pypi, (ROOT / "README.md").read_text()),
        long_description_content_type="text/markdown",
    )
