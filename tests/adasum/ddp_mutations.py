"""What users do to a model under DDP between two steps: with the hook, and without it."""

# No `from __future__ import annotations` here: torch compares a hook's annotations with classes.

import copy
import random
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

import adasum as hvd
from adasum.ddp import HookState, ddp_hook
from collectives import CollectiveMismatchError
from tests.adasum.ddp_model import Net, columns_of, compare, gradients, loss_of, warnings_of
from tests.adasum.definition import relative_error, tolerance, tree

STEPS = 12
Mutation = Callable[["Pair", random.Random], None]


def reference_hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Adasum of each parameter's gradients by the definition, from all ranks' gathered ones."""
    for gradient in bucket.gradients():
        rows = [torch.empty_like(gradient) for _ in range(dist.get_world_size())]
        dist.all_gather(rows, gradient.contiguous())
        answer = tree([row.reshape(-1) for row in rows])
        gradient.copy_(answer.view(gradient.shape))
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def equal_on_ranks(parameter: Tensor) -> bool:
    """Whether the parameter's gradient is the same on all ranks; collective."""
    gradient = parameter.grad
    mine = torch.full(parameter.shape, torch.nan) if gradient is None else gradient.detach().clone()
    first = mine.contiguous()
    dist.broadcast(first, 0)
    same = torch.tensor([first.equal(mine) or bool(first.isnan().all() and mine.isnan().all())])
    dist.all_reduce(same, dist.ReduceOp.MIN)
    return bool(same)


class Pair:
    """The same model twice: reduced by our hook, and by DDP itself or the reference."""

    def __init__(self, op: str, rng: random.Random, state: HookState) -> None:
        self.op, self.rank = op, dist.get_rank()
        self.static = rng.random() < 0.2
        # DDP itself fails where some are under no_sync, too.
        self.unused = not self.static and rng.random() < 0.5
        self.options: dict[str, Any] = {
            "bucket_cap_mb": rng.choice([1e-5, 0.05, 25.0]),
            "gradient_as_bucket_view": rng.random() < 0.5,
            "find_unused_parameters": not self.static,
            "static_graph": self.static,
        }
        self.state = state
        model = Net()
        model.never = nn.Linear(2, 2)
        self.models = [self.wrap(copy.deepcopy(model), ours) for ours in (True, False)]
        self.optimizers: list[torch.optim.Optimizer] = []
        self.kept: list[tuple[list[Tensor], list[Tensor]]] = []
        # Whether gradients were given other memory.
        self.moved = False
        self.make_optimizers()

    def wrap(self, model: nn.Module, ours: bool) -> DistributedDataParallel:
        wrapped = DistributedDataParallel(model, **self.options)
        if ours:
            wrapped.register_comm_hook(self.state, ddp_hook)
        elif self.op == "Adasum":
            wrapped.register_comm_hook(None, reference_hook)
        return wrapped

    def make_optimizers(self) -> None:
        self.optimizers = [
            torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
            for model in self.models
        ]

    def parameters(self) -> list[tuple[nn.Parameter, nn.Parameter]]:
        ours, theirs = (model.parameters() for model in self.models)
        return list(zip(ours, theirs, strict=True))

    def each(self, function: Callable[[DistributedDataParallel], Any]) -> None:
        """Do it to both; where ours says that a gradient was moved, they are wrapped anew."""
        refused = []
        for model in self.models:
            try:
                function(model)
            except RuntimeError as error:
                if not (self.moved and self.options["gradient_as_bucket_view"]):
                    raise
                refused.append(str(error))
        if refused:
            assert len(refused) == 1
            assert "was moved" in refused[0]
            self.wrap_again()
            for model in self.models:
                model.zero_grad()

    def wrap_again(self) -> None:
        self.moved = False
        self.models = [self.wrap(model.module, model is self.models[0]) for model in self.models]

    def compare(self) -> None:
        for i, (ours, theirs) in enumerate(self.parameters()):
            synced = [equal_on_ranks(each) for each in (ours, theirs)]
            assert synced[0] == synced[1], (i, synced)
            a, b = ours.grad, theirs.grad
            assert (a is None) == (b is None), (i, a is None)
            if a is None or b is None:
                continue
            assert (a.dtype, a.shape) == (b.dtype, b.shape)
            if self.op == "Average":
                # Of two ranks, halves and their sum round as the sum's half does.
                assert torch.equal(a, b), i
            elif synced[0]:
                # Gradients may be accumulated over all steps of a sequence, and reduced each time.
                error = relative_error(a, b)
                assert error <= STEPS * tolerance(a.dtype), (i, error)
        for values, copies in self.kept:
            assert all(map(torch.equal, values, copies))

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
        # From the same values again, so that roundings do not add up.
        with torch.no_grad():
            for ours, theirs in self.parameters():
                ours.copy_(theirs)


def backward(pair: Pair, rng: random.Random, *, sync: bool = True) -> None:
    """One or several, of one loss or of two."""
    step, kind = rng.randrange(100), "one" if pair.static else rng.choice(["one", "two", "more"])
    # A layer that one rank, or all, leave out.
    side = rng.choice([True, pair.rank == 0, False]) if pair.unused else True

    def run(model: DistributedDataParallel) -> None:
        with nullcontext() if sync else model.no_sync():
            loss = loss_of(model, pair.rank, step, side=side)
            if kind == "two":
                loss = loss + loss_of(model.module, pair.rank, step + 1, side=side)
            loss.backward(retain_graph=kind == "more")
        if kind == "more" and not pair.unused:
            with model.no_sync():
                loss_of(model, pair.rank, step + 2, side=side).backward()

    pair.each(run)
    pair.compare()


def accumulate(pair: Pair, rng: random.Random) -> None:
    if not (pair.static or pair.unused):
        backward(pair, rng, sync=False)


def zero(pair: Pair, rng: random.Random) -> None:
    to_none = rng.random() < 0.5
    pair.each(lambda model: model.zero_grad(set_to_none=to_none))
    pair.kept.clear()


def step(pair: Pair, rng: random.Random) -> None:
    pair.step()


def keep(pair: Pair, rng: random.Random) -> None:
    """Copies of gradients that the user took."""
    for model in pair.models:
        values = [p.grad.detach().clone() for p in model.parameters() if p.grad is not None]
        pair.kept.append((values, [value.clone() for value in values]))


def gradient_data(pair: Pair, rng: random.Random) -> None:
    def change(model: DistributedDataParallel) -> None:
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.data = parameter.grad.data.clone()

    pair.each(change)
    pair.moved = True


def gradient_replaced(pair: Pair, rng: random.Random) -> None:
    transposed = rng.random() < 0.5

    def change(model: DistributedDataParallel) -> None:
        for parameter in model.parameters():
            if parameter.grad is not None:
                new = parameter.grad.detach().clone()
                parameter.grad = new.t().contiguous().t() if transposed and new.dim() == 2 else new

    pair.each(change)


def round_trip(pair: Pair, rng: random.Random) -> None:
    pair.each(lambda model: model.half().float())
    # DDP has hooks where gradients were accumulated before, and calls nobody afterwards.
    pair.wrap_again()


def data_replaced(pair: Pair, rng: random.Random) -> None:
    def change(model: DistributedDataParallel) -> None:
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()

    pair.each(change)


def loaded(pair: Pair, rng: random.Random) -> None:
    pair.each(lambda model: model.load_state_dict(copy.deepcopy(model.state_dict())))


def clipped(pair: Pair, rng: random.Random) -> None:
    for model in pair.models:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    pair.compare()


def wrapped_again(pair: Pair, rng: random.Random) -> None:
    """As after a change of requires_grad: another DDP, with the same state."""
    frozen = rng.random() < 0.5
    for model in pair.models:
        model.module.middle.bias.requires_grad_(not frozen)
        if frozen:
            model.module.middle.bias.grad = None
    pair.wrap_again()


def copied(pair: Pair, rng: random.Random) -> None:
    """A deep copy has no hook, of ours or of others, until it gets one."""
    pair.models = [copy.deepcopy(model) for model in pair.models]
    state = next(state for hook, state in pair.models[0]._comm_hooks)
    pair.models[0].register_comm_hook(state, ddp_hook)
    if pair.op == "Adasum":
        pair.models[1].register_comm_hook(None, reference_hook)
    pair.state = state
    pair.make_optimizers()


def other_optimizers(pair: Pair, rng: random.Random) -> None:
    pair.make_optimizers()


MUTATIONS: list[Mutation] = [
    accumulate,
    zero,
    step,
    keep,
    gradient_data,
    gradient_replaced,
    round_trip,
    data_replaced,
    loaded,
    clipped,
    wrapped_again,
    copied,
    other_optimizers,
]


def check_moved_gradients(rank: int) -> None:
    """A gradient that was moved out of its bucket is an error on every rank that names it."""

    def last(model: DistributedDataParallel) -> None:
        model.module.last.bias.grad.data = torch.zeros(3)

    def all_of_them(model: DistributedDataParallel) -> None:
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.data = parameter.grad.data.clone()

    for wrapper in (None, default_hooks.fp16_compress_wrapper):
        for change in (last, all_of_them):
            for ranks in ({0, 1, 2, 3}, {1}):
                model = Net()
                wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
                names = dict(model.named_parameters())
                state = HookState(op=hvd.Adasum, named_parameters=names.items())
                hook = wrapper(ddp_hook) if wrapper else ddp_hook
                wrapped.register_comm_hook(state, hook)
                for _ in range(2):
                    loss_of(wrapped, rank, 0).backward()
                if rank in ranks:
                    change(wrapped)
                error = RuntimeError if rank in ranks else CollectiveMismatchError
                with pytest.raises(error, match=r"the gradient of \w+\.\w+ was moved"):
                    loss_of(wrapped, rank, 1).backward()
                # The way out that the error names.
                again = DistributedDataParallel(model, gradient_as_bucket_view=True)
                again.register_comm_hook(state, hook)
                again.zero_grad()
                loss_of(again, rank, 1).backward()
                if wrapper is None:
                    columns = columns_of(model, 1)
                    compare(gradients(again), "Adasum", columns, torch.float32)


def check_copied_model(rank: int) -> None:
    """A copy says that it has no hook; its state is complete, and has names for its parameters."""
    model, pair = Net(), dist.new_group()
    names = dict(model.named_parameters())
    wrapped = DistributedDataParallel(model)
    state = HookState(op=hvd.Adasum, process_group=pair, named_parameters=names.items())
    wrapped.register_comm_hook(state, ddp_hook)
    with warnings_of("adasum.ddp") as texts:
        assert copy.deepcopy(state).process_group is pair
    assert texts == []
    with warnings_of("adasum.ddp") as texts:
        copied = copy.deepcopy(wrapped)
    assert len(texts) == 1
    assert "call register_comm_hook on it" in texts[0]
    ((_, other),) = copied._comm_hooks
    assert other is not state
    assert other.process_group is pair
    for name, parameter in copied.module.named_parameters():
        assert other.name_of(parameter) == name
    copied.register_comm_hook(other, ddp_hook)
    columns = columns_of(model, 0)
    for each in (copied, wrapped):
        loss_of(each, rank, 0).backward()
        compare(gradients(each), "Adasum", columns, torch.float32)


def mutations_job(rank: int, seeds: list[int]) -> list[list[str]]:
    """Run the sequences; what each of them did."""
    dist.init_process_group("gloo")
    hvd.init(timeout=60.0)
    done = []
    for seed in seeds:
        # Alike on all ranks.
        rng = random.Random(seed)
        op = rng.choice(["Average", "Adasum"])
        state = HookState(op=getattr(hvd, op), algorithm=rng.choice([None, "rd"]))
        pair = Pair(op, rng, state)
        names = [op]
        for _ in range(STEPS):
            mutation = rng.choice([backward, *MUTATIONS])
            names.append(mutation.__name__)
            try:
                mutation(pair, rng)
                if mutation is not backward:
                    backward(pair, rng)
            except BaseException as error:
                raise AssertionError(f"seed {seed}, after {names}: {error!r}") from error
        done.append(names)
    return done
