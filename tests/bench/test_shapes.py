"""The models' shape tables against their published counts."""

import math

from bench.shapes import MODELS


def test_shapes_of_each_model_have_its_published_counts() -> None:
    counts = {name: (len(s), sum(map(math.prod, s))) for name, s in MODELS.items()}
    published = {"ResNet-50": (161, 25_557_032), "BERT-large": (398, 336_226_108)}
    published |= {"GPT-2 XL": (580, 1_557_611_200), "Llama-7B layer": (9, 202_383_360)}
    assert counts == published
