"""Which tensors were broadcast in a group, so that errors do not advise to do it again."""

from __future__ import annotations

from collections.abc import Iterable
from weakref import WeakKeyDictionary

from torch import Tensor

from collectives import Group

# By address, since model.state_dict() makes other tensors of the parameters' memory.
_addresses: WeakKeyDictionary[Group, set[int]] = WeakKeyDictionary()


def remember_broadcast(group: Group, tensors: Iterable[Tensor]) -> None:
    """Take note that these tensors are equal on all ranks of the group now."""
    addresses = _addresses.setdefault(group, set())
    addresses.update(tensor.data_ptr() for tensor in tensors if tensor.numel())


def was_broadcast(group: Group, tensor: Tensor) -> bool:
    """Return whether a tensor with this memory was broadcast; a guess, for advice alone."""
    return tensor.data_ptr() in _addresses.get(group, ())
