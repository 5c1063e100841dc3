"""What DistributedOptimizer refuses: arguments, models, gradients, and with what error."""

from __future__ import annotations

import copy
import pickle
import types
from typing import Any

import pytest
import torch

import adasum as hvd
import collectives
from adasum import DistributedOptimizer, OptimizerOrderError
from adasum.optimizer.arguments import require_own_autograd
from tests.adasum.definition import flat, make_model
from tests.adasum.jobs import on_ranks


def _sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def _construct(**options: Any) -> Any:
    model = options.pop("model", None) or make_model()
    optimizer = options.pop("optimizer", None) or _sgd(model)
    return collectives.run_threads(1, lambda group: DistributedOptimizer(optimizer, **options))[0]


def test_named_parameters_that_are_not_unique_and_complete_raise() -> None:
    model = make_model()
    named = list(model.named_parameters())
    with pytest.raises(ValueError, match=r"unique; repeated: 0\.weight$"):
        _construct(model=model, named_parameters=[*named, ("0.weight", named[1][1])])
    with pytest.raises(ValueError, match=r"without a name: param_groups\[0\]\['params'\]\[1\] of"):
        _construct(model=model, named_parameters=[named[0], *named[2:]])
    with pytest.raises(ValueError, match=r"tuples as model\.named_parameters"):
        _construct(model=model, named_parameters=model.parameters())
    other = torch.nn.Parameter(torch.zeros(1))
    _construct(model=model, named_parameters=[*named, ("other", other), ("tied", named[0][1])])


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"optimizer": "sgd"}, TypeError, "optimizer must be a torch.optim.Optimizer, got str"),
        ({"weighted": 1}, TypeError, "weighted must be"),
        ({"weighted": False}, ValueError, "weighted=False is for op=Adasum, .* got Average"),
        ({"op": "Adasum"}, TypeError, "op must be Sum, Average, Adasum.* got 'Adasum'"),
        ({"op": hvd.Max}, ValueError, "op must be Sum, Average, Adasum or a Reducer.* got Max"),
        ({"num_groups": -1}, ValueError, "num_groups must be an int >= 0, got -1"),
        ({"num_groups": 2, "groups": 2}, ValueError, "give only groups"),
        ({"compression": "fp16"}, TypeError, "compression must have compress and decompress"),
        ({"backward_passes_per_step": 0}, ValueError, "backward_passes_per_step .* got 0"),
        ({"backward_passes_per_step": 1.5}, ValueError, "backward_passes_per_step .* got 1.5"),
        ({"backward_passes_per_step": True}, ValueError, "backward_passes_per_step .* got True"),
        ({"gradient_predivide_factor": 2.0, "op": hvd.Sum}, ValueError, "op != Average"),
        ({"gradient_predivide_factor": 2.0, "op": hvd.Adasum}, ValueError, "op != Average"),
        ({"gradient_predivide_factor": 0.0}, ValueError, "must be > 0 and finite, got 0.0"),
        (
            {"gradient_predivide_factor": float("inf")},
            ValueError,
            "must be > 0 and finite, got inf",
        ),
        ({"groups": 0}, ValueError, "groups must be at least 1, got 0"),
        ({"groups": 1.5}, ValueError, "groups must be a positive int or a list"),
        ({"groups": True}, ValueError, "groups must be a positive int or a list"),
        ({"groups": ["weight"]}, ValueError, r"groups\[0\] must be a list of parameters"),
        ({"groups": [["weight"]]}, ValueError, r"groups\[0\] must hold parameters, got str"),
        ({"groups": [[torch.zeros(2)]]}, ValueError, "the optimizer does not have"),
        ({"process_set": 1}, TypeError, "process_set"),
        ({"process_set": hvd.ProcessSet([0])}, ValueError, "add_process_set"),
        ({"memory_size": 0.0}, ValueError, "memory_size must be a positive number of MiB"),
        ({"groups_size": 0}, ValueError, "groups_size must be at least 1, got 0"),
        ({"algorithm": "bogus"}, ValueError, "algorithm='bogus': .* invalid algorithm 'bogus'"),
        ({"algorithm": "collective", "op": hvd.Adasum}, ValueError, "cannot do Adasum: use .*vhdd"),
        ({"method": "deltas"}, ValueError, "method must be 'delta' or 'gradient', got 'deltas'"),
        ({"step_in_backward": True}, ValueError, "step_in_backward needs op=Adasum"),
    ],
)
def test_optimizer_with_a_bad_argument_raises(
    options: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        _construct(**options)


def test_groups_that_repeat_a_parameter_raise() -> None:
    model = make_model()
    with pytest.raises(ValueError, match=r"groups lists 0\.bias twice"):
        _construct(
            model=model,
            named_parameters=model.named_parameters(),
            groups=[[model[0].bias], [model[2].bias, model[0].bias]],
        )


def test_wrapping_twice_raises() -> None:
    model = make_model()
    plain = _sgd(model)
    wrapped = _construct(optimizer=plain)
    for again in (plain, wrapped):
        with pytest.raises(ValueError, match="already wrapped"):
            _construct(optimizer=again)


def test_wrapping_before_init_raises() -> None:
    with pytest.raises(RuntimeError, match="init"):
        DistributedOptimizer(_sgd(make_model()))


@on_ranks(2)
def test_copying_or_pickling_the_wrapper_raises(group: collectives.Group) -> None:
    """A copy would reduce nothing."""
    optimizer = DistributedOptimizer(_sgd(make_model()))
    for take in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match=r"cannot be copied or pickled: take its state_dic"):
            take(optimizer)
    assert copy.deepcopy(optimizer.state_dict()) == optimizer.state_dict()


def test_ranks_with_different_models_raise_the_mismatch_everywhere() -> None:
    def run(group: collectives.Group) -> str:
        parameter = torch.nn.Parameter(torch.ones(3 + group.rank))
        other = torch.nn.Parameter(torch.ones(100_000))
        optimizer = DistributedOptimizer(
            torch.optim.SGD([other, parameter], lr=1.0),
            [("other", other), ("scale", parameter)],
            op=hvd.Adasum,
            groups=2,
        )
        (parameter.sum() + other.sum()).backward()
        with pytest.raises(hvd.CollectiveMismatchError) as e:
            optimizer.step()
        # The step was undone: no rank is left with its own difference, nor with the result of the
        # second bucket, whose shapes are equal.
        assert torch.equal(parameter.detach(), torch.ones(3 + group.rank))
        assert torch.equal(other.detach(), torch.ones(100_000))
        return str(e.value)

    first, second = collectives.run_threads(2, run)
    assert first == second
    assert "(3,)" in first
    assert "(4,)" in first


def test_an_optimizer_whose_step_was_replaced_raises_before_anything_is_changed() -> None:
    def run(group: collectives.Group, scheduled: bool) -> None:
        plain = _sgd(make_model())
        step = plain.step
        plain.step = types.MethodType(lambda self, closure=None: step(closure), plain)
        if scheduled:
            torch.optim.lr_scheduler.StepLR(plain, 1)
        with pytest.raises(ValueError, match=r"step was replaced .* that it returns"):
            DistributedOptimizer(plain)
        del plain.step
        optimizer: Any = DistributedOptimizer(plain)
        called = []
        inner = optimizer.step
        optimizer.step = lambda closure=None: called.append(1) or inner(closure)
        optimizer.step()
        assert called

    for scheduled in (False, True):
        collectives.run_threads(1, lambda group, how=scheduled: run(group, how))


@pytest.mark.parametrize("op", [hvd.Average, hvd.Adasum], ids=str)
def test_two_optimizers_of_one_parameter_leave_it_to_the_newer_one(op) -> None:
    """As after a reload that keeps the old one; a step of that is an error that says why."""

    def run(group: collectives.Group) -> list[torch.Tensor]:
        model = make_model().float()
        first: Any = DistributedOptimizer(_sgd(model), op=op, method="gradient")
        second: Any = DistributedOptimizer(_sgd(model), op=op, method="gradient")
        data = torch.full((1, 6), group.rank + 1.0)
        start = flat(model)
        model(data).sum().backward()
        with pytest.raises(OptimizerOrderError, match=r"reduced twice.*Step only the newer one"):
            first.step()
        assert torch.equal(start, flat(model))
        second.step()
        assert not torch.equal(start, flat(model))
        return [flat(model)]

    one, other = collectives.run_threads(2, run)
    assert torch.equal(one[0], other[0])


class OnGpu(torch.nn.Parameter):
    """A parameter that says it is on a GPU."""

    is_cuda = True  # type: ignore[assignment]


def test_ranks_that_are_threads_are_refused_where_a_gpus_backward_would_wait() -> None:
    named = [("a", torch.nn.Parameter(torch.zeros(1))), ("b", OnGpu(torch.zeros(1)))]

    def run(group: collectives.Group) -> None:
        require_own_autograd(group, named[:1])
        with pytest.raises(ValueError, match="share autograd's one thread of a GPU"):
            require_own_autograd(group, named)

    collectives.run_threads(2, run)
    # One rank has the thread to itself.
    collectives.run_threads(1, lambda group: require_own_autograd(group, named))


def test_set_observer_without_an_observers_methods_raises() -> None:
    with pytest.raises(TypeError, match=r"before_reduction and after_reduction, got int"):
        _construct().set_observer(3)
