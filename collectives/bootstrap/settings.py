"""The arguments of `init`, and whether a second call's agree with the first one's."""

from __future__ import annotations

import os
from typing import Literal, NamedTuple, TypeAlias, get_args

import torch.distributed as dist

from collectives import validation

# Seconds. Where one rank validates or saves for longer, the user passes `timeout`.
TIMEOUT = 300.0
# How tensors may travel; `init` says what each is.
TransportName: TypeAlias = Literal["auto", "gloo", "shm", "nccl"]
_CHOICES = get_args(TransportName)


def transport_choice(transport: str | None) -> str:
    """Return the argument, else ADASUM_TRANSPORT, else "auto"; ValueError if that is unknown."""
    source, choice = "transport", transport
    if choice is None:
        source, choice = "ADASUM_TRANSPORT", os.environ.get("ADASUM_TRANSPORT") or "auto"
    if choice == "tcp":
        # An earlier version's name for messages over TCP, which now go by gloo.
        return "gloo"
    if choice not in _CHOICES:
        raise ValueError(f"{source} must be one of {', '.join(_CHOICES)}, got {choice!r}")
    return choice


class Settings(NamedTuple):
    """The arguments of `init`; None for one that was left out."""

    timeout: float | None = None
    process_group: dist.ProcessGroup | None = None
    transport: str | None = None

    def checked(self) -> Settings:
        """Return the arguments, checked, with defaults for those that were left out."""
        timeout = TIMEOUT if self.timeout is None else self.timeout
        validation.timeout(timeout)
        if self.process_group is not None:
            check_process_group(self.process_group)
        return Settings(timeout, self.process_group, transport_choice(self.transport))

    def require_same(self, first: Settings) -> None:
        """Raise ValueError if a given argument differs from the first call's, as `checked`."""
        for name, given, value, earlier in zip(
            self._fields, self, self.checked(), first, strict=True
        ):
            if given is not None and value != earlier:
                raise ValueError(
                    f"{name} is {value!r} in a second call of init, and was {earlier!r} in the "
                    "first: leave it out, or call shutdown() before"
                )


def check_process_group(process_group: object) -> None:
    """Raise TypeError unless this is a process group that this rank is in."""
    if not (dist.is_available() and isinstance(process_group, dist.ProcessGroup)):
        raise TypeError(
            "process_group must be a torch.distributed.ProcessGroup that this rank is in, got "
            f"{type(process_group).__name__}"
        )
