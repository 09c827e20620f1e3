"""The arithmetic of large models on many GPUs: parameters are the published ones, and the page has what is computed."""

from pathlib import Path

import pytest

import scale
from scale import BERT_LARGE, GPT2_XL, MODELS
from weft.tasks.factory import body_on_meta

PAGE = Path(__file__).parents[1] / "docs" / "scale.md"


def test_parameters_are_the_published_ones():
    assert scale.parameters(GPT2_XL) == 1_557_611_200  # openai-community/gpt2-xl
    # bert-large-uncased has 335,141,888; the head for masked words adds a dense layer, a norm and the biases of 30,522.
    assert scale.parameters(BERT_LARGE) - 335_141_888 == pytest.approx(1024 * 1024 + 3 * 1024 + 30_522, rel=1e-3)


@pytest.mark.parametrize("model", MODELS.values())
def test_blocks_are_counted_as_they_are_built(model):
    """All but the blocks, by PyTorch's count, is less than the vocabulary and the positions with a head to spare."""
    body = body_on_meta(model.run, model.vocab)
    outside = scale.parameters(model) - model.run.model.layers * scale.block_parameters(model)
    embeddings = (model.vocab + 1024) * body.width
    assert 0 < outside < 1.1 * embeddings


def test_rings_and_shards():
    weights = scale.parameters(GPT2_XL)
    assert scale.exchanged(GPT2_XL, 2, sharded=False) == 4 * weights  # half of the gradients out, half of the sums back
    assert scale.states(GPT2_XL, 1, sharded=False) == 16 * weights
    shards = [scale.states(GPT2_XL, gpus, sharded=True) for gpus in (8, 64, 512)]
    assert shards == sorted(shards, reverse=True)
    assert shards[-1] > 6 * scale.block_parameters(GPT2_XL)  # two blocks are whole at a time
    slow, fast = (scale.tokens_per_s(GPT2_XL, gpus, False, 4096) / gpus for gpus in (16, 8))
    assert slow < 0.5 * fast  # the network between nodes is nine times as slow


def test_the_page_has_these_tables():
    page = PAGE.read_text(encoding="utf-8")
    assert scale.memory_table(MODELS) in page
    assert scale.speed_table(MODELS) in page
    assert scale.speed_table({"BERT-large": GPT2_XL}) not in page
