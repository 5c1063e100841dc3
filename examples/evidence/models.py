"""The models that are trained, beside train_digits.py's LeNet and characters.py's."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

# EfficientNet-Lite0's stages: expansion, channels, blocks, stride, kernel. Source: the published
# configuration of EfficientNet-Lite, which is that of EfficientNet-B0 (arXiv 1905.11946) without
# squeeze-and-excitation, with ReLU6.
_STAGES = (
    (1, 16, 1, 1, 3),
    (6, 24, 2, 2, 3),
    (6, 40, 2, 2, 5),
    (6, 80, 3, 2, 3),
    (6, 112, 3, 1, 5),
    (6, 192, 4, 2, 5),
    (6, 320, 1, 1, 3),
)


class Residual(nn.Module):
    """Two 3 x 3 convolutions beside a shortcut, each with a group norm.

    Group norm, because batch norm's statistics would be each rank's own and make the number of
    ranks change the model.
    """

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, out, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = nn.GroupNorm(8, out), nn.GroupNorm(8, out)
        same = channels == out and stride == 1
        self.shortcut = nn.Identity() if same else nn.Conv2d(channels, out, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        inner = functional.relu(self.norm1(self.first(x)))
        return functional.relu(self.norm2(self.second(inner)) + self.shortcut(x))


class ResNet(nn.Sequential):
    """Three residual blocks for images of 28 by 28 in ten classes; 307,690 weights."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 32, 3, 2, 1, bias=False),
            nn.GroupNorm(8, 32),
            nn.ReLU(),
            Residual(32, 32, 1),
            Residual(32, 64, 2),
            Residual(64, 128, 2),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(128, 10),
        )


class Inverted(nn.Module):
    """MBConv: 1 x 1 up, depthwise, 1 x 1 down, with a shortcut where shapes allow it."""

    def __init__(self, channels: int, out: int, expansion: int, stride: int, kernel: int) -> None:
        super().__init__()
        inner = channels * expansion
        if expansion > 1:
            self._expand_conv = nn.Conv2d(channels, inner, 1, bias=False)
            self._bn0 = nn.BatchNorm2d(inner, eps=1e-3)
        self._depthwise_conv = nn.Conv2d(
            inner, inner, kernel, stride, kernel // 2, groups=inner, bias=False
        )
        self._bn1 = nn.BatchNorm2d(inner, eps=1e-3)
        self._project_conv = nn.Conv2d(inner, out, 1, bias=False)
        self._bn2 = nn.BatchNorm2d(out, eps=1e-3)
        self.shortcut = stride == 1 and channels == out

    def forward(self, x: Tensor) -> Tensor:
        inner = x
        if hasattr(self, "_expand_conv"):
            inner = functional.relu6(self._bn0(self._expand_conv(inner)))
        inner = functional.relu6(self._bn1(self._depthwise_conv(inner)))
        inner = self._bn2(self._project_conv(inner))
        return x + inner if self.shortcut else inner


class EfficientNetLite0(nn.Module):
    """EfficientNet-Lite0 with ten classes, on grey images made 64 by 64; 3,341,802 weights.

    At 32 by 32 its last stages see one pixel each, and its head gives zeros.

    Batch norm keeps ImageNet's statistics and weights: those of each rank's few images would
    differ, and a small set would spoil them. Strided convolutions pad on all sides, where the
    weights' own training padded right and below.
    """

    def __init__(self, weights: Mapping[str, Tensor] | None = None) -> None:
        super().__init__()
        self._conv_stem = nn.Conv2d(3, 32, 3, 2, 1, bias=False)
        self._bn0 = nn.BatchNorm2d(32, eps=1e-3)
        blocks, channels = [], 32
        for expansion, out, count, stride, kernel in _STAGES:
            for i in range(count):
                blocks.append(Inverted(channels, out, expansion, 1 if i else stride, kernel))
                channels = out
        self._blocks = nn.Sequential(*blocks)
        self._conv_head = nn.Conv2d(320, 1280, 1, bias=False)
        self._bn1 = nn.BatchNorm2d(1280, eps=1e-3)
        if weights is not None:
            body = {name: value for name, value in weights.items() if not name.startswith("_fc")}
            self.load_state_dict(body)
        # After the pretrained weights, whose classifier is for a thousand classes.
        self._fc = nn.Linear(1280, 10)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.requires_grad_(False)
        self.eval()

    def forward(self, images: Tensor) -> Tensor:
        x = functional.interpolate(images, size=(64, 64), mode="bilinear", align_corners=False)
        x = functional.relu6(self._bn0(self._conv_stem(x.expand(-1, 3, -1, -1))))
        x = functional.relu6(self._bn1(self._conv_head(self._blocks(x))))
        return self._fc(x.mean(dim=(2, 3)))


def weights_of(model: nn.Module) -> int:
    """Return how many weights are trained."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Return the share of the labels that the model gives, a few hundred images at a time."""
    with torch.no_grad():
        answers = torch.cat([model(part).argmax(dim=1) for part in images.split(512)])
    return (answers == labels).float().mean().item()
