"""What those who come from Horovod are told, and what they find on an optimizer."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import pytest
import torch

import adasum as hvd
from adasum.horovod import basics, capabilities
from collectives import Group, run_threads
from tests.adasum.jobs import Counting, on_ranks


def optimizer(**options: Any) -> Any:
    model = torch.nn.Linear(2, 2)
    return hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), **options)


@pytest.mark.parametrize("name", ["__wrapped__", "_optimizer", "nothing_like_it"])
def test_name_unlike_any_other_raises_without_a_guess(name: str) -> None:
    with pytest.raises(AttributeError, match=rf"has no attribute '{name}'$"):
        getattr(hvd, name)


def rates_warned_of(asked: bool, built: bool, local_size: int, **options: Any) -> list[str]:
    """The warnings of four ranks that construct their optimizers twice."""

    def run(group: Group) -> None:
        if asked:
            # The condition of Horovod's examples.
            hvd.nccl_built() and hvd.local_size()
        group.barrier()
        for _ in range(2):
            optimizer(**options)

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        patch.setattr(capabilities, "_answered_nccl", False)
        patch.setattr(torch.distributed, "is_nccl_available", lambda: built)
        patch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 3))
        run_threads(4, run, local_size=local_size)
    return [str(each.message) for each in caught if each.category is UserWarning]


def test_rate_that_may_be_scaled_for_horovods_adasum_is_warned_of_once() -> None:
    (text,) = rates_warned_of(True, True, 2, op=hvd.Adasum)
    assert "2 ranks on this host" in text
    # Both ways out.
    assert "do not multiply it" in text
    assert 'algorithm="rechd/vhdd"' in text


@pytest.mark.parametrize(
    ("asked", "built", "local_size", "options"),
    [
        (False, True, 2, {"op": hvd.Adasum}),
        (True, False, 2, {"op": hvd.Adasum}),
        (True, True, 1, {"op": hvd.Adasum}),
        (True, True, 2, {"op": hvd.Average}),
        (True, True, 2, {"op": hvd.Adasum, "algorithm": "rechd/vhdd"}),
    ],
)
def test_rate_that_is_right_is_not_warned_of(
    asked: bool, built: bool, local_size: int, options: dict[str, Any]
) -> None:
    assert rates_warned_of(asked, built, local_size, **options) == []


def test_horovods_environment_variables_are_reported_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(basics, "_looked_for_variables", False)
    monkeypatch.setenv("HOROVOD_FUSION_THRESHOLD", "0")
    monkeypatch.setenv("HOROVOD_CYCLE_TIME", "1")
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with caplog.at_level(logging.WARNING, logger="adasum"):
        for _ in range(2):
            hvd.init()
            hvd.shutdown()
    (record,) = caplog.records
    assert "HOROVOD_CYCLE_TIME, HOROVOD_FUSION_THRESHOLD" in record.getMessage()


@on_ranks(2)
def test_optimizer_has_horovods_attributes(group: Group) -> None:
    some = hvd.add_process_set([0])
    wrapped = optimizer(
        op=hvd.Average,
        gradient_predivide_factor=2.0,
        backward_passes_per_step=3,
        process_set=some,
    )
    assert wrapped.op is hvd.Average
    assert wrapped.process_set is some
    assert wrapped.backward_passes_per_step == 3
    wrapped.set_backward_passes_per_step(2)
    assert wrapped.backward_passes_per_step == 2
    assert optimizer().process_set is hvd.global_process_set


def test_num_groups_makes_buckets_and_is_deprecated() -> None:
    def run(group: Group) -> int:
        model = torch.nn.Sequential(*[torch.nn.Linear(2, 2, bias=False) for _ in range(6)])
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        # By position, as Horovod has it.
        wrapped = hvd.DistributedOptimizer(sgd, None, hvd.Compression.none, 1, hvd.Average, 1.0, 3)
        observer = Counting()
        wrapped.set_observer(observer)
        model(torch.ones(1, 2)).sum().backward()
        wrapped.step()
        return observer.calls

    with pytest.warns(DeprecationWarning, match="num_groups is deprecated: use groups"):
        assert run_threads(2, run) == [3, 3]


@on_ranks(1)
def test_model_in_the_place_of_its_named_parameters_is_refused(group: Group) -> None:
    model: Any = torch.nn.Linear(2, 2)
    with pytest.raises(TypeError, match=r"must be model.named_parameters\(\), not the model"):
        hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
