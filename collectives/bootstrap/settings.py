"""What `init` is called with, and whether a second call asks for the same."""

from __future__ import annotations

from typing import NamedTuple

import torch.distributed as dist

from collectives import validation
from collectives.bootstrap.transport_selection import transport_choice

TIMEOUT = 300.0


class Settings(NamedTuple):
    """The arguments of `init`; None where one was left out.

    Attributes:
        timeout: Seconds for a step.
        process_group: Whose ranks to use.
        transport: How CPU tensors travel.
    """

    timeout: float | None = None
    process_group: dist.ProcessGroup | None = None
    transport: str | None = None

    def checked(self) -> Settings:
        """Return them with what was left out filled in.

        Raises:
            TypeError, ValueError: One is wrong; the text names it.
        """
        timeout = TIMEOUT if self.timeout is None else self.timeout
        validation.timeout(timeout)
        if self.process_group is not None:
            check_process_group(self.process_group)
        return Settings(timeout, self.process_group, transport_choice(self.transport))

    def require_same(self, first: Settings) -> None:
        """Raise ValueError where these give another value than those of the first call, `checked`.

        What is left out here is whatever it was there.
        """
        rows = zip(self._fields, self, self.checked(), first, strict=True)
        for name, given, value, earlier in rows:
            if given is not None and value != earlier:
                raise ValueError(
                    f"{name} is {value!r} in a second call of init, and was {earlier!r} in the "
                    "first: leave it out, or call shutdown() before"
                )


def check_process_group(process_group: object) -> None:
    """Raise TypeError for what is no process group that this rank is in."""
    if not (dist.is_available() and isinstance(process_group, dist.ProcessGroup)):
        raise TypeError(
            "process_group must be a torch.distributed.ProcessGroup that this rank is in, got "
            f"{type(process_group).__name__}"
        )
