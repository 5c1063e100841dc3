"""Training with order="tree": one result on every number of ranks.

The frozen table has such sums over every transport.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import adasum as hvd
import collectives
from adasum import DistributedOptimizer, HookState
from adasum.optimizer.pass_tree import PassTree
from collectives import Group
from tests.adasum.jobs import on_ranks
from tests.collectives.test_tree_order import reference, same_bits, values

LEAVES = 8
STEPS = 30


def lenet() -> nn.Module:
    """Two convolutions and two linear layers, for images of 8 by 8."""
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(4, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 10)),
    )


MODEL = lenet()


def batch(step: int, leaf: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + leaf)
    images = torch.randn(2, 1, 8, 8, generator=generator)
    return images, torch.randint(10, (2,), generator=generator)


def digest(model: nn.Module) -> str:
    found = hashlib.blake2b(digest_size=8)
    for parameter in model.parameters():
        found.update(parameter.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


class Run:
    """A training of LEAVES micro-batches a step, on any number of ranks."""

    def __init__(self, group: Group, leaves: int = LEAVES, **options: Any) -> None:
        self.group, self.passes = group, leaves // group.size
        self.model = copy.deepcopy(MODEL)
        plain = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        options = {"op": hvd.Average, "order": "tree", **options}
        self.optimizer = DistributedOptimizer(
            plain, self.model.named_parameters(), backward_passes_per_step=self.passes, **options
        )

    def steps(self, first: int, last: int) -> str:
        """Take steps first to last - 1; return a hash of the parameters."""
        for step in range(first, last):
            self.optimizer.zero_grad()
            for number in range(self.passes):
                images, labels = batch(step, self.group.rank * self.passes + number)
                cross_entropy(self.model(images), labels).backward()
            self.optimizer.step()
        return digest(self.model)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """The bits of torch's convolutions depend on its threads, which ranks would share."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def one_rank() -> str:
    """The hash after all steps on one rank, which adds all leaves by itself."""
    return collectives.run_threads(1, lambda group: Run(group).steps(0, STEPS))[0]


@pytest.mark.parametrize("size", [8, 4, 2])
def test_trainings_on_any_number_of_ranks_end_with_the_bits_of_one(
    size: int, one_rank: str
) -> None:
    found = collectives.run_threads(size, lambda group: Run(group).steps(0, STEPS))
    assert found == [one_rank] * size


def test_without_an_order_the_number_of_ranks_shows(one_rank: str) -> None:
    # Else the test above would show nothing.
    options: Any = {"order": None, "op": hvd.Sum, "algorithm": "xring"}
    found = [
        collectives.run_threads(size, lambda group: Run(group, **options).steps(0, STEPS))[0]
        for size in (8, 4)
    ]
    assert len({*found, one_rank}) == 3


def test_passes_may_change_between_two_steps() -> None:
    def job(group: Group) -> str:
        run = Run(group)
        run.steps(0, 3)
        run.passes = 2 * LEAVES // group.size
        run.optimizer.set_backward_passes_per_step(run.passes)
        return run.steps(3, 6)

    assert len({text for size in (1, 2, 4) for text in collectives.run_threads(size, job)}) == 1


@pytest.mark.parametrize(("leaves", "sizes"), [(12, (12, 6, 3)), (6, (6, 3, 1)), (5, (5, 1))])
def test_numbers_of_leaves_that_are_no_power_of_two_keep_the_tree_where_they_split(
    leaves: int, sizes: tuple[int, ...]
) -> None:
    found = {
        text
        for size in sizes
        for text in collectives.run_threads(size, lambda group: Run(group, leaves).steps(0, 3))
    }
    assert len(found) == 1


@pytest.mark.parametrize(
    "options",
    [
        {"op": hvd.Sum},
        {"mode": "owners"},
        {"groups": 3},
        {"algorithm": "rechd"},
        {"compression": hvd.Compression.bf16},
    ],
    ids=str,
)
def test_no_option_of_the_optimizer_changes_that(options: dict[str, Any]) -> None:
    found = {
        text
        for size in (4, 2)
        for text in collectives.run_threads(size, lambda group: Run(group, **options).steps(0, 4))
    }
    if "compression" in options:
        # A rank's own sum is not compressed: the rounding lies elsewhere in the tree.
        assert len(found) == 2
        return
    if "op" not in options:
        found |= {*collectives.run_threads(1, lambda group: Run(group).steps(0, 4))}
    assert len(found) == 1


@on_ranks(3)
def test_sums_accumulated_in_float32_round_once(group: Group) -> None:
    parameter = nn.Parameter(torch.zeros(300, dtype=torch.bfloat16))
    leaves = [values(300, torch.bfloat16, rank) for rank in range(group.size)]
    for mode in (None, "owners"):
        plain = torch.optim.SGD([parameter], lr=1.0)
        options: Any = {"op": hvd.Sum, "order": "tree", "accumulate": torch.float32}
        optimizer = DistributedOptimizer(plain, [("p", parameter)], mode=mode, **options)
        optimizer.zero_grad()
        (parameter * leaves[group.rank]).sum().backward()
        optimizer.synchronize()
        if mode is None:
            left, right = leaves[0].float() + leaves[1].float(), leaves[2].float()
            assert parameter.grad is not None
            assert same_bits(parameter.grad, (left + right).bfloat16())
        with optimizer.skip_synchronize():
            optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("passes", range(1, 18))
def test_passes_are_added_by_the_balanced_tree(passes: int) -> None:
    """Also where some of them do not reach a parameter, or the step comes early."""
    for missing in ({}, {0}, {1, 2}, {passes - 1}, {*range(passes // 2, passes)}):
        leaves = [values(64, torch.float16, 31 * passes + i) for i in range(passes)]
        tree, parameter = PassTree(divides=False), nn.Parameter(leaves[0])
        for number, leaf in enumerate(leaves):
            parameter.grad = None if number in missing else leaf.clone()
            if number == passes - 1:
                tree.finish([parameter], passes)
            tree.end_pass([parameter], passes)

        if len(missing) < passes:
            zeros = torch.zeros(64, dtype=torch.float16)
            added = [zeros if i in missing else leaf for i, leaf in enumerate(leaves)]
            assert parameter.grad is not None
            assert same_bits(parameter.grad, reference(added, hvd.Sum, None))


@on_ranks(2)
def test_what_cuts_the_tree_is_refused_with_what_does_not(group: Group) -> None:
    with pytest.raises(ValueError, match=r"=3 on 2 ranks cuts the tree .* pass 1, 2, 4, 8"):
        Run(group, leaves=6)
    run = Run(group, leaves=4)
    with pytest.raises(ValueError, match=r"=6 on 2 ranks cuts the tree"):
        run.optimizer.set_backward_passes_per_step(6)
    with pytest.raises(ValueError, match=r"accumulate=.* and backward_passes_per_step=2"):
        Run(group, leaves=4, accumulate=torch.float32)
    with pytest.raises(ValueError, match="gradient_predivide_factor and order='tree' exclude"):
        Run(group, leaves=2, gradient_predivide_factor=2.0)
    with pytest.raises(ValueError, match="is for Sum and Average, not for Adasum"):
        Run(group, leaves=2, op=hvd.Adasum)
    with pytest.raises(ValueError, match=r"algorithm='xring': .*cannot carry Average"):
        Run(group, leaves=2, algorithm="xring")


@on_ranks(2)
def test_pass_too_many_is_an_error(group: Group) -> None:
    run = Run(group, leaves=4)
    images, labels = batch(0, 0)
    for _ in range(2):
        cross_entropy(run.model(images), labels).backward()
    with pytest.raises(hvd.OptimizerOrderError, match="more than backward_passes_per_step=2"):
        cross_entropy(run.model(images), labels).backward()


def test_passes_changed_within_a_step_are_an_error_that_loses_nothing() -> None:
    def job(group: Group) -> tuple[str, str]:
        run = Run(group, leaves=4)
        images, labels = batch(0, 2 * group.rank)
        run.optimizer.zero_grad()
        cross_entropy(run.model(images), labels).backward()
        with pytest.raises(hvd.OptimizerOrderError, match=r"between two passes .* zero_grad\(\)"):
            run.optimizer.set_backward_passes_per_step(4)
        images, labels = batch(0, 2 * group.rank + 1)
        cross_entropy(run.model(images), labels).backward()
        run.optimizer.step()
        run.optimizer.set_backward_passes_per_step(4)
        return digest(run.model), Run(group, leaves=4).steps(0, 1)

    for changed, plain in collectives.run_threads(2, job):
        assert changed == plain


def test_sparse_gradients_have_no_order_unless_made_dense() -> None:
    def job(group: Group) -> list[Tensor]:
        found = []
        for dense in (False, True):
            table = nn.Embedding.from_pretrained(torch.ones(9, 4), freeze=False, sparse=True)
            plain = torch.optim.SGD(table.parameters(), lr=1.0)
            options: Any = {"op": hvd.Sum, "order": "tree", "sparse_as_dense": dense}
            optimizer = DistributedOptimizer(
                plain, table.named_parameters(), backward_passes_per_step=2, **options
            )
            refused = pytest.raises(
                NotImplementedError, match="no sum of order='tree': pass sparse"
            )
            with nullcontext() if dense else refused:
                for _ in range(2):
                    table(torch.tensor([group.rank, 3])).sum().backward()
                optimizer.step()
                found.append(table.weight.detach().clone())
        return found

    first, second = collectives.run_threads(2, job)
    assert torch.equal(first[0], second[0])
    assert first[0][:, 0].tolist() == [-1, -1, 1, -3, 1, 1, 1, 1, 1]


@on_ranks(3)
def test_horovods_functions_take_the_order(group: Group) -> None:
    leaves = [values(90, torch.bfloat16, rank) for rank in range(3)]
    total = (leaves[0] + leaves[1]) + leaves[2]
    mine, rows = leaves[group.rank], total.view(9, 10)[3 * group.rank :][:3]
    wide = ((leaves[0].float() + leaves[1].float()) + leaves[2].float()).bfloat16()
    options: Any = {"op": hvd.Sum, "order": "tree"}
    for function, want in (
        *((hvd.allreduce, total), (hvd.allreduce_, total), (hvd.reducescatter, rows)),
        *((hvd.allreduce_async, total), (hvd.allreduce_async_, total)),
        (hvd.reducescatter_async, rows),
    ):
        given = mine.view(9, 10) if want is rows else mine
        grouped = getattr(hvd, f"grouped_{function.__name__}")
        for call, arguments in ((function, given.clone()), (grouped, [given.clone()])):
            found = call(arguments, **options)
            found = found if isinstance(found, Tensor | list) else hvd.synchronize(found)
            assert same_bits(found[0] if call is grouped else found, want), call
    assert same_bits(hvd.allreduce(mine, accumulate=torch.float32, **options), wide)
    assert same_bits(hvd.allreduce(mine, order="tree"), total / 3)
    leaf = mine.clone().requires_grad_()
    hvd.allreduce(leaf, **options).backward(mine)
    assert leaf.grad is not None and same_bits(leaf.grad, total)


def test_hook_states_check_the_order() -> None:
    assert HookState(hvd.Sum, order="tree").op.ordered
    with pytest.raises(ValueError, match="is for Sum and Average, not for Adasum"):
        HookState(hvd.Adasum, order="tree")
