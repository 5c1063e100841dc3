"""What users do to gradients, parameters and settings between two steps, as torch lets them.

Each takes the `Side` that it is done to: a rank's own model and optimizer, or one of the plain ones
beside it that say what must come out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


class Model(torch.nn.Module):
    """A convolution, a cloud of points and two heads, of which a forward takes one."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(2, 3, 2)
        self.points = torch.nn.Parameter(torch.empty(4, 3))
        self.extra = torch.nn.ParameterList()
        self.spectrum = torch.nn.Parameter(torch.empty(3, dtype=torch.complex64))
        self.heads = torch.nn.ModuleList(torch.nn.Linear(12, 2) for _ in range(2))
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for each in self.parameters():
                each.copy_(torch.randn(each.shape, generator=generator, dtype=each.dtype))

    def forward(self, x: Tensor, head: int) -> Tensor:
        features = torch.tanh(self.conv(x)).flatten(1)
        out = self.heads[head](features).square().mean()
        cloud = self.points.square().mean(0) * x.mean()
        out = out + (cloud - 1).square().sum() + (cloud * self.spectrum).abs().square().sum()
        for each in self.extra:
            out = out + (each * x.mean() - 1).square().mean()
        return out


@dataclass
class Side:
    """A model with its optimizer, and what has been kept of them."""

    model: Model
    optimizer: Any
    kept: list[tuple[list[Tensor | None], list[Tensor | None]]] = field(default_factory=list)
    pre: list[Callable[[], None]] = field(default_factory=list)
    post: list[Callable[[], None]] = field(default_factory=list)
    head: int = 0

    def register(self, before: bool) -> None:
        """Have the optimizer's step run the hooks; beside plain ones the definition runs them."""
        if before:
            self.optimizer.register_step_pre_hook(lambda *_: run(self.pre))
        self.optimizer.register_step_post_hook(lambda *_: run(self.post))

    def gradients(self) -> list[Tensor]:
        """The gradients that there are."""
        return [p.grad for p in self.model.parameters() if p.grad is not None]


def run(hooks: list[Callable[[], None]]) -> None:
    """Call each."""
    for hook in hooks:
        hook()


def replace(side: Side, old: torch.nn.Parameter, new: torch.nn.Parameter) -> None:
    """Put a parameter at another's place in the groups, with its state resized."""
    for group in side.optimizer.param_groups:
        group["params"] = [new if each is old else each for each in group["params"]]
    state = side.optimizer.state.pop(old, None)
    if state:
        side.optimizer.state[new] = {key: resized(value, len(new)) for key, value in state.items()}


def resized(value: Any, rows: int) -> Any:
    """Return a state tensor with so many rows, zeros where it had none."""
    if not isinstance(value, Tensor) or value.dim() == 0:
        return value
    longer = torch.cat([value, torch.zeros_like(value)])
    return longer[:rows].clone()


def swap_parameter(side: Side) -> None:
    old = side.model.points
    rows = 6 if len(old) < 6 else 4
    new = torch.nn.Parameter(resized(old.detach() + 0.25, rows))
    side.model.points = new
    replace(side, old, new)


def append_parameter(side: Side) -> None:
    new = torch.nn.Parameter(torch.full((3,), 0.5 + len(side.model.extra)))
    side.model.extra.append(new)
    side.optimizer.param_groups[0]["params"].append(new)


def remove_parameter(side: Side) -> None:
    if len(side.model.extra):
        gone = side.model.extra[0]
        for group in side.optimizer.param_groups:
            group["params"] = [each for each in group["params"] if each is not gone]
        side.optimizer.state.pop(gone, None)
        side.model.extra = torch.nn.ParameterList(list(side.model.extra)[1:])


def replace_groups(side: Side) -> None:
    groups = side.optimizer.param_groups
    side.optimizer.param_groups = [{**group, "params": list(group["params"])} for group in groups]


def reverse_groups(side: Side) -> None:
    side.optimizer.param_groups[0]["params"].reverse()


def add_group(side: Side) -> None:
    new = torch.nn.Parameter(torch.full((2,), 0.75))
    side.model.extra.append(new)
    side.optimizer.add_param_group({"params": [new], "lr": 0.05})


def new_shape(side: Side) -> None:
    points = side.model.points
    rows = 6 if len(points) < 6 else 4
    points.grad = None
    points.data = resized(points.data, rows)
    state = side.optimizer.state.get(points)
    if state:
        side.optimizer.state[points] = {key: resized(value, rows) for key, value in state.items()}


def new_memory(side: Side) -> None:
    for each in side.model.parameters():
        each.data = each.data.clone()


def through_half(side: Side) -> None:
    # Not of the complex one, which torch has no arithmetic for in half precision.
    side.model.conv.half()
    side.model.conv.float()


def through_double(side: Side) -> None:
    side.model.heads.double()
    side.model.heads.float()


def channels_last(side: Side) -> None:
    weight = side.model.conv.weight
    last = weight.is_contiguous()
    side.model.conv.to(memory_format=torch.channels_last if last else torch.contiguous_format)


def change_values(side: Side) -> None:
    with torch.no_grad():
        side.model.points.mul_(0.9)


def freeze_or_thaw(side: Side) -> None:
    weight = side.model.conv.weight
    weight.requires_grad_(not weight.requires_grad)
    weight.grad = None


def change_rate(side: Side) -> None:
    for group in side.optimizer.param_groups:
        group["lr"] *= 0.8


def reload_optimizer(side: Side) -> None:
    if hasattr(side.optimizer, "consolidate_state_dict"):
        side.optimizer.consolidate_state_dict(to=None)
    state = side.optimizer.state_dict()
    side.optimizer.load_state_dict(state)


def other_head(side: Side) -> None:
    side.head = 1 - side.head


def post_hook(side: Side) -> None:
    def clamp() -> None:
        with torch.no_grad():
            side.model.points.clamp_(-1.5, 1.5)

    side.post.append(clamp)


def pre_hook(side: Side) -> None:
    def shrink() -> None:
        for each in side.gradients():
            each.mul_(0.75)

    side.pre.append(shrink)


def remove_hooks(side: Side) -> None:
    side.pre.clear()
    side.post.clear()


def zeros(side: Side) -> None:
    side.optimizer.zero_grad(set_to_none=False)


def nones_by_the_model(side: Side) -> None:
    side.model.zero_grad()


# Done before zero_grad, which follows.
BEFORE: list[Callable[[Side], None]] = [
    *(swap_parameter, append_parameter, remove_parameter, replace_groups, reverse_groups),
    *(add_group, new_shape, new_memory, through_half, through_double, channels_last),
    *(change_values, freeze_or_thaw, change_rate, reload_optimizer, other_head),
    *(post_hook, pre_hook, remove_hooks, zeros, nones_by_the_model),
]


def halve_data(side: Side) -> None:
    for each in side.gradients():
        each.data = each.data * 0.5


def share_memory(side: Side) -> None:
    side.model.heads[side.head].share_memory()


def halve_in_place(side: Side) -> None:
    for each in side.gradients():
        each.data.mul_(0.5)


def halve_by_another(side: Side) -> None:
    for each in side.model.parameters():
        if each.grad is not None:
            each.grad = each.grad * 0.5


def drop_one(side: Side) -> None:
    side.model.points.grad = None


def keep(side: Side) -> None:
    held = [each.grad for each in side.model.parameters()]
    side.kept.append((held, [None if each is None else each.clone() for each in held]))


def gradients_through_half(side: Side) -> None:
    side.model.conv.half()
    side.model.conv.float()


def new_strides(side: Side) -> None:
    gradient = side.model.heads[side.head].weight.grad
    if gradient is not None:
        side.model.heads[side.head].weight.grad = gradient.t().contiguous().t()


# Done between backward and step.
AFTER: list[Callable[[Side], None]] = [
    *(halve_data, halve_in_place, halve_by_another, drop_one, keep, gradients_through_half),
    *(new_strides, share_memory),
]
