"""What the fuzzers found in `adasum`, each once more by itself."""

from __future__ import annotations

import pytest
import torch

import adasum
from adasum import Sum
from collectives import Group, run_threads


def test_functions_on_ranks_with_a_bad_argument_name_it() -> None:
    def run(group: Group) -> float:
        ones = torch.ones(2)
        for call, words in [
            (lambda: adasum.allreduce(ones, compression=None), "compression must have compress"),
            (lambda: adasum.allreduce(ones, average=ones), "average must be a bool"),
            (lambda: adasum.broadcast(ones, "0"), "root_rank must be an int"),
            (lambda: adasum.broadcast_object(1, name=3), "name must be a str or None"),
            (lambda: adasum.reducescatter(ones, prescale_factor="2"), "prescale_factor must be"),
            (lambda: adasum.join(device="cuda"), "device must be of type int"),
            (lambda: adasum.grouped_allreduce(ones), "tensors must be a list of tensors"),
            (lambda: adasum.ddp_hook(None, None), "state must be a HookState"),
        ]:
            with pytest.raises(TypeError, match=words):
                call()
        # A tensor without rows that wants a gradient, too.
        with pytest.raises(ValueError, match="first dimension"):
            adasum.allgather(torch.tensor(1.0, requires_grad=True))
        return adasum.allreduce(ones, op=Sum)[0].item()

    assert run_threads(2, run) == [2.0] * 2


def test_functions_without_ranks_with_a_bad_argument_name_it() -> None:
    for call, error, words in [
        (lambda: adasum.synchronize(None), TypeError, "handle must be"),
        (lambda: adasum.ProcessSet(torch.tensor([0, 1])), TypeError, "must be a list of ranks"),
        (lambda: adasum.process_set_by_id("0"), TypeError, "process_set_id must be an int"),
    ]:
        with pytest.raises(error, match=words):
            call()
