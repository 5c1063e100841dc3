"""Names of Python and torch in our signatures, as inventories that intersphinx reads.

The inventories of both sites would have to be fetched at each build; a name that is not here has no
link.
"""

from __future__ import annotations

import zlib
from pathlib import Path

ABC = ("Callable", "Iterable", "Iterator", "Mapping", "Sequence")
# By site: names as autodoc writes them, and where they are.
SITES = {
    "https://docs.python.org/3": {
        **{f"collections.abc.{name}": "library/collections.abc.html#$" for name in ABC},
        "os.PathLike": "library/os.html#$",
    },
    "https://docs.pytorch.org/docs/stable": {
        "torch.Tensor": "tensors.html#$",
        "Tensor": "tensors.html#torch.Tensor",
        "torch.Size": "size.html#$",
        "torch.dtype": "tensor_attributes.html#$",
        "torch.device": "tensor_attributes.html#$",
        "torch.nn.modules.module.Module": "generated/torch.nn.Module.html#torch.nn.Module",
        "torch.optim.optimizer.Optimizer": "optim.html#torch.optim.Optimizer",
        "torch.cuda.streams.Stream": "generated/torch.cuda.Stream.html#torch.cuda.Stream",
    },
}


def write_inventories(folder: Path) -> dict[str, tuple[str, str]]:
    """Write the inventories into the folder, and return intersphinx_mapping."""
    folder.mkdir(parents=True, exist_ok=True)
    mapping = {}
    for name, (site, places) in zip(("python", "torch"), SITES.items(), strict=True):
        head = f"# Sphinx inventory version 2\n# Project: {name}\n# Version: \n"
        head += "# The remainder of this file is compressed using zlib.\n"
        lines = "".join(f"{each} py:class 1 {place} -\n" for each, place in places.items())
        path = folder / f"{name}.inv"
        path.write_bytes(head.encode() + zlib.compress(lines.encode()))
        mapping[name] = (site, str(path))
    return mapping
