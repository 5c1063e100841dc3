"""What hooks on gradients call of an optimizer, and what it does by default."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from adasum.optimizer.buckets.planning import Named
from adasum.optimizer.buckets.reduction import Reduction


class Reduces:
    """What an optimizer does when its hooks say so; each method of reduction fills it in."""

    def _start_bucket(self, members: Sequence[Named], bucket: str) -> list[Reduction]:
        """Start reducing the members of a bucket."""
        raise NotImplementedError

    def _finish_reductions(self) -> None:
        """Do what is left when all buckets of a step are reduced; may call collectives."""

    def _check_parameters(self) -> None:
        """Let ranks compare the parameters that are new, before anything of them is reduced."""

    def _densify(self, named: Sequence[Named]) -> None:
        """Make gradients dense where `sparse_as_dense` asks for it, on one rank too."""

    @staticmethod
    def _wants_before(parameter: Tensor) -> bool:
        """Return whether `_before_gradient` is to be called for this parameter."""
        return False

    def _before_gradient(self, parameter: Tensor) -> None:
        """Prepare a parameter for the accumulation of its gradient."""

    def _wants(self, parameter: Tensor) -> bool:
        """Return whether a parameter that is not trainable is to be reduced all the same.

        Asked where buckets start early: somebody may have given it a gradient.
        """
        return False

    def _is_left(self, parameter: Tensor) -> bool:
        """Return whether the parameter's gradient is the one that the last step has left."""
        return False
