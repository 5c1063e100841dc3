"""The models' shape tables against their published counts."""

from __future__ import annotations

import math

import pytest

from bench.shapes import MODELS


@pytest.mark.parametrize(
    ("model", "tensors", "elements"),
    [
        ("ResNet-50", 161, 25_557_032),
        ("BERT-large", 398, 336_226_108),
        ("GPT-2 XL", 580, 1_557_611_200),
        ("Llama-7B layer", 9, 202_383_360),
    ],
)
def test_shapes_of_a_model_have_its_published_counts(model, tensors, elements):
    shapes = MODELS[model]
    assert (len(shapes), sum(map(math.prod, shapes))) == (tensors, elements)
