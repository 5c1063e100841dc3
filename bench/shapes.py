"""Parameter shapes of real models, in the order in which their modules list them.

These are what a data-parallel step packs and reduces. tests/bench/test_shapes.py checks the counts
and totals.
"""

from __future__ import annotations

Shape = tuple[int, ...]


def resnet50() -> list[Shape]:
    """ResNet-50 for 224x224 images and 1,000 classes: 161 tensors, 25,557,032 elements.

    Bottleneck blocks of (1x1, 3x3, 1x1) convolutions (arXiv 1512.03385, table 1), each followed by
    a batch norm with weight and bias; the first block of a stage has a 1x1 shortcut as well.
    """
    shapes: list[Shape] = []

    def convolution(outputs: int, inputs: int, kernel: int) -> None:
        shapes.extend([(outputs, inputs, kernel, kernel), (outputs,), (outputs,)])

    convolution(64, 3, 7)
    inputs = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            convolution(width, inputs, 1)
            convolution(width, width, 3)
            convolution(4 * width, width, 1)
            if block == 0:
                convolution(4 * width, inputs, 1)
            inputs = 4 * width
    return [*shapes, (1000, 2048), (1000,)]


def bert_large() -> list[Shape]:
    """BERT-large, uncased, with both pre-training heads: 398 tensors, 336,226,108 elements.

    `BertForPreTraining` of Hugging Face transformers: the 391 tensors of `BertModel` and the
    heads' 7; the decoder of the language-model head shares the word embeddings.
    """
    hidden, inner, vocabulary = 1024, 4096, 30522
    norm: list[Shape] = [(hidden,), (hidden,)]
    dense: list[Shape] = [(hidden, hidden), (hidden,)]
    embeddings: list[Shape] = [(vocabulary, hidden), (512, hidden), (2, hidden), *norm]
    attention: list[Shape] = [*dense, *dense, *dense, *dense, *norm]
    feed_forward: list[Shape] = [(inner, hidden), (inner,), (hidden, inner), (hidden,), *norm]
    layer = attention + feed_forward
    pooler = dense
    heads: list[Shape] = [(vocabulary,), *dense, *norm, (2, hidden), (2,)]
    return [*embeddings, *(layer * 24), *pooler, *heads]


def gpt2_xl() -> list[Shape]:
    """GPT-2 XL: 580 tensors, 1,557,611,200 elements; the output layer shares the embeddings."""
    hidden = 1600
    norm: list[Shape] = [(hidden,), (hidden,)]
    attention: list[Shape] = [(hidden, 3 * hidden), (3 * hidden,), (hidden, hidden), (hidden,)]
    mlp: list[Shape] = [(hidden, 4 * hidden), (4 * hidden,), (4 * hidden, hidden), (hidden,)]
    layer = [*norm, *attention, *norm, *mlp]
    return [(50257, hidden), (1024, hidden), *(layer * 48), *norm]


def llama_7b_layer() -> list[Shape]:
    """One decoder layer of Llama 7B: 9 tensors, 202,383,360 elements, no biases."""
    hidden, inner = 4096, 11008
    attention: list[Shape] = [(hidden, hidden)] * 4
    mlp: list[Shape] = [(inner, hidden), (inner, hidden), (hidden, inner)]
    return [*attention, *mlp, (hidden,), (hidden,)]


MODELS: dict[str, list[Shape]] = {
    "ResNet-50": resnet50(),
    "BERT-large": bert_large(),
    "GPT-2 XL": gpt2_xl(),
    "Llama-7B layer": llama_7b_layer(),
}
