"""What ranks have to ask for alike, in words: the settings that give a step its meaning."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from adasum.optimizer.consistency.checksums import describe_parameters, describe_shape
from adasum.optimizer.consistency.parameter_check import Setting, setting_name

# Of lists and dicts within each other: deeper than any optimizer's, since one may hold itself.
_MAX_DEPTH = 8


def describe_hyperparameters(optimizer: torch.optim.Optimizer, kind: type) -> list[Setting]:
    """Return (name, value) of the optimizer's class and of all in its groups but parameters.

    Numbers, strings and tensors by their value, other objects by their class. `kind` is the
    optimizer's class before it was wrapped.
    """
    rows = [("the optimizer's class", f"{kind.__module__}.{kind.__qualname__}")]
    for i, group in enumerate(optimizer.param_groups):
        values = {key: value for key, value in group.items() if key != "params"}
        rows += [
            (setting_name(key, i), describe_value(values[key])) for key in sorted(values, key=str)
        ]
    return rows


def describe_value(value: Any, depth: int = 0) -> str:
    """Return a value in words, the same for equal ones on every rank.

    What lies too deep, as in a list that holds itself, has no words.
    """
    if depth > _MAX_DEPTH:
        return "..."
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, Tensor):
        return _describe_tensor(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(describe_value(each, depth + 1) for each in value)}]"
    if isinstance(value, Mapping):
        keys = sorted(value, key=str)
        return f"{{{', '.join(f'{k!r}: {describe_value(value[k], depth + 1)}' for k in keys)}}}"
    if isinstance(value, float) or (type(value) is int and abs(value) < 2**53):
        # 1 and 1.0 are one learning rate, and so are 0.0 and -0.0.
        value = float(value) + 0.0
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        return repr(value)
    kind = value if isinstance(value, type) else type(value)
    return f"{kind.__module__}.{kind.__qualname__}"


def _describe_tensor(tensor: Tensor) -> str:
    if tensor.numel() == 1 and tensor.layout is torch.strided and not tensor.is_meta:
        return repr(tensor.item())
    described = describe_parameters([("", tensor)])
    return " ".join(described[0][1:]) if described else describe_shape(tensor)
