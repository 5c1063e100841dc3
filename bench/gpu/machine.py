"""What the machine has, found by a process of its own: CUDA starts there and ends with it.

python -m bench.gpu.machine      # one line of JSON; status 2 where torch sees no GPU
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from adasum.check.checks import NO_GPU
from bench.processes import ROOT, run
from bench.provenance import version
from collectives.transport import load_nccl

PACKAGES = ("kernels", "collectives", "adasum", "bench", "tests")
# Seconds to find what the machine has: a driver may hang.
LIMIT = 120.0
_SUFFIXES = (".py", ".c", ".h", ".toml")


def facts(environment: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return what a process with these variables more finds.

    RuntimeError of one line: no GPU, torch cannot be imported, or it takes longer than LIMIT.
    """
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log.txt"
        command = [sys.executable, "-m", "bench.gpu.machine"]
        status = run(command, log, LIMIT, environment)
        said = [line for line in log.read_text().splitlines() if line.strip()]
    lines = [line for line in said if line.startswith("{")]
    if status or not lines:
        why = f"status {status}" if status is not None else f"no answer within {LIMIT:g} s"
        raise RuntimeError(said[-1] if said and status is not None else why)
    found: dict[str, Any] = json.loads(lines[-1])
    return found


@functools.cache
def source_of(packages: tuple[str, ...] = PACKAGES, root: Path = ROOT) -> str:
    """Return a digest of packages' source: what a commit says, and what differs from it."""
    digest = hashlib.sha256()
    for package in packages:
        for path in sorted((root / package).rglob("*")):
            if path.suffix in _SUFFIXES and path.is_file():
                digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def sanitizer() -> str | None:
    """Return the path of compute-sanitizer, None where it is not installed."""
    homes = [os.environ.get("CUDA_HOME", ""), "/usr/local/cuda"]
    folders = [os.environ.get("PATH", ""), *(f"{home}/bin" for home in homes if home)]
    return shutil.which("compute-sanitizer", path=os.pathsep.join(folders))


def _find() -> dict[str, Any]:
    if not torch.cuda.is_available():
        raise RuntimeError(NO_GPU)

    gpu = torch.cuda.get_device_properties(0)
    try:
        nccl, why_not = load_nccl().get_version(), ""
    except (ImportError, RuntimeError) as error:
        nccl, why_not = 0, " ".join(str(error).split())
    of_torch = torch.cuda.nccl.version() if torch.distributed.is_nccl_available() else ()
    return {
        "device": gpu.name,
        "gpus": torch.cuda.device_count(),
        "capability": f"{gpu.major}.{gpu.minor}",
        "memory": f"{gpu.total_memory / 2**30:.0f} GiB",
        "multiprocessors": gpu.multi_processor_count,
        "cache": f"{gpu.L2_cache_size / 2**20:.0f} MiB",
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": version("triton"),
        "cupy": version("cupy-cuda13x", "cupy-cuda12x"),
        "python": platform.python_version(),
        "nccl of torch": ".".join(map(str, of_torch[:3])),
        "nccl of cupy": nccl,
        "why no nccl of cupy": why_not,
    }


def main() -> int:
    """Print the facts; return the exit status."""
    try:
        print(json.dumps(_find()))
    except (ImportError, RuntimeError) as error:
        print(f"bench.gpu: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
