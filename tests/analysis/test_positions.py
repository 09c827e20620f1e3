"""The positions of a model are found, are those that it adds, and become a page, a picture and data."""

import json

import numpy as np
import pytest
import torch
from torch import nn

from weft.analysis.positions import Positions, positions_in, sinusoidal
from weft.analysis.render.export import render_positions
from weft.errors import RoleError
from weft.models.transformer import Transformer, TransformerConfig
from weft.nn.attention.positions import Learned

PNG = b"\x89PNG\r\n\x1a\n"


def transformer(positions, longest=1024):
    config = TransformerConfig(
        name="transformer", width=8, heads=2, layers=1, ffn_width=8, positions=positions, max_positions=longest
    )
    return Transformer(config, 11)


def distance_alone(similarity):
    """Whether what stands on one diagonal is one number."""
    diagonals = (np.diagonal(similarity, step) for step in range(len(similarity)))
    return all(np.ptp(diagonal) < 1e-4 for diagonal in diagonals)


def test_with_no_model_they_are_those_of_the_paper():
    found = sinusoidal()
    assert found.vectors.shape == (100, 128)
    for position, pair in ((0, 0), (1, 0), (7, 5), (99, 63)):
        angle = position / 10000 ** (2 * pair / 128)
        np.testing.assert_allclose(
            found.vectors[position, 2 * pair : 2 * pair + 2], [np.sin(angle), np.cos(angle)], atol=1e-5
        )
    assert found.title == "sinusoidal: 100 positions, 128 wide"


def test_of_sinusoidal_ones_the_similarity_hangs_on_distance_alone():
    found = sinusoidal(32, 50)
    assert distance_alone(found.similarity)
    assert (found.similarity.argmax(1) == np.arange(50)).all()
    torch.manual_seed(0)
    assert not distance_alone(positions_in(transformer("learned"), "transformer")[0].similarity)


def test_those_of_a_model_are_those_that_it_adds():
    for kind in ("sinusoidal", "learned"):
        model = transformer(kind)
        (found,) = positions_in(model, "transformer")
        assert found.name == kind
        np.testing.assert_allclose(found.vectors, model.positions(torch.arange(100)).detach().numpy(), atol=1e-6)


def test_of_many_that_are_learned_the_first_are_shown():
    assert positions_in(transformer("learned", 300), "m")[0].title == "learned: the first 100 of 300 positions, 8 wide"
    assert positions_in(transformer("learned", 30), "m")[0].title == "learned: 30 positions, 8 wide"
    assert len(positions_in(nn.ModuleList([Learned(5, 4), Learned(6, 4)]), "own")) == 2


def test_a_model_without_positions_is_refused():
    with pytest.raises(RoleError, match="model: 'seq2seq' has no position encodings to draw; give one that has"):
        positions_in(nn.Linear(2, 2), "seq2seq")


def test_they_are_a_page_a_picture_and_data():
    found = sinusoidal(8, 10)
    page = render_positions([found], ".html", "weft look: positions", "about", print).decode()
    assert page.count('<div class="plot grid"') == 2
    assert "sinusoidal: 10 positions, 8 wide" in page
    assert "dot product of two positions" in page
    assert render_positions([found], ".png", "t", "", print).startswith(PNG)
    data = json.loads(render_positions([found], ".json", "t", "", print))
    assert list(data) == ["name", "positions", "width", "vectors", "similarity"]
    assert (data["positions"], data["width"]) == (10, 8)
    np.testing.assert_allclose(data["vectors"], found.vectors, atol=1e-6)
    np.testing.assert_allclose(data["similarity"], np.array(data["vectors"]) @ np.array(data["vectors"]).T, atol=1e-4)


def test_one_position_of_one_number_is_drawn_too():
    tiny = Positions("learned", np.zeros((1, 1)), 1)
    for ending in (".html", ".png", ".json"):
        assert render_positions([tiny], ending, "t", "", print)
