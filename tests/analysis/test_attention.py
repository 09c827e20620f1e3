"""What was captured gets its tokens, is shown, and is given as plain data."""

import html
import json
import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from weft.analysis.attention import Attention, View, legend, views_of
from weft.errors import ConfigError
from weft.nn.attention.capture import capture, record

SOURCE, TARGET, READ = ["a", "b", "</s>"], ["x", "</s>"], ["<s>", "x"]


def captured(*recorded, layers=None, heads=None):
    with capture(layers, heads) as maps:
        for place, layer, *shape in recorded:
            record(place, torch.rand(1, *shape), layer)
    return maps


def test_each_place_has_the_tokens_of_its_sides():
    maps = captured(("encoder", 0, 2, 3, 3), ("decoder", 0, 2, 2, 2), ("cross", 0, 2, 2, 3), ("self", 0, 2, 2))
    encoder, decoder, cross, own = views_of(maps, SOURCE, TARGET, READ)
    assert (encoder.rows, encoder.columns) == (SOURCE, SOURCE)
    assert (decoder.rows, decoder.columns) == (READ, READ)
    assert (cross.rows, cross.columns) == (TARGET, SOURCE)
    assert (own.rows, own.columns) == (READ, READ)
    assert [view.weights.shape for view in (encoder, cross, own)] == [(2, 3, 3), (2, 2, 3), (1, 2, 2)]


def test_the_weights_are_those_recorded_in_the_order_of_their_heads():
    maps = captured(("cross", 3, 4, 2, 3), heads=[2, 0])
    (view,) = views_of(maps, SOURCE, TARGET, READ)
    assert (view.layer, view.heads, view.name) == (3, [2, 0], "cross, layer 3, head 2")
    np.testing.assert_array_equal(view.weights, maps.weights["cross", 3][0][0])


def test_steps_that_tokens_do_not_fit_go_by_their_numbers():
    (view,) = views_of(captured(("self", 0, 2, 3)), SOURCE, TARGET, READ)
    assert (view.rows, view.columns) == (READ, ["1", "2", "3"])


def test_what_was_read_from_the_end_is_turned_round():
    maps = captured(("backward", 0, 2, 2), ("self", 0, 2, 2))
    backward, forward = views_of(maps, SOURCE, TARGET, READ)
    np.testing.assert_array_equal(backward.weights[0], maps.weights["backward", 0][0][0].flip(0, 1))
    np.testing.assert_array_equal(forward.weights[0], maps.weights["self", 0][0][0])


def test_a_head_that_is_not_there_is_refused():
    with pytest.raises(ConfigError, match=r"heads: the model has 2 heads, counted from 0, but \[0, 2\] are asked for"):
        captured(("cross", 0, 2, 2, 3), heads=[2, 0])
    with pytest.raises(ConfigError, match=r"heads: the model's attention has no heads, but \[1\] are requested"):
        views_of(captured(("cross", 0, 2, 3), heads=[1]), SOURCE, TARGET, READ)
    assert views_of(captured(("cross", 0, 2, 3), heads=[0]), SOURCE, TARGET, READ)[0].heads == [0]


def look(*places):
    views = [
        View(place, layer, list(range(heads)), np.full((heads, 2, 3), 1 / 3), TARGET, SOURCE)
        for place, layer, heads in places
    ]
    return Attention("a b", {"text": "x", "score": -0.5}, "x", views)


def test_the_first_view_is_at_hand():
    found = look(("cross", 0, 1), ("cross", 1, 1))
    assert (found.source, found.target, found.place) == (SOURCE, TARGET, "cross, layer 0")
    assert found.weights.shape == (2, 3)
    assert look(("cross", 0, 2)).place == "cross, layer 0, head 0"


def test_where_something_looks_across_that_is_at_hand():
    found = look(("encoder", 0, 2), ("decoder", 0, 2), ("cross", 1, 2), ("cross", 2, 2))
    assert found.place == "cross, layer 1, head 0"
    assert found.main_view is found.views[2]
    assert look(("encoder", 3, 2), ("decoder", 0, 2)).place == "encoder, layer 3, head 0"


def test_a_layer_without_any_of_the_heads_is_left_out():
    with capture(heads=[1]) as maps:
        record("cross", torch.rand(1, 0, 2, 3), 0, [])
        record("cross", torch.rand(1, 1, 2, 3), 1, [1])
    assert [(view.layer, view.heads) for view in views_of(maps, SOURCE, TARGET, READ)] == [(1, [1])]
    del maps.weights["cross", 1]
    with pytest.raises(ConfigError, match=r"heads: \[1\] are pruned in all of these layers"):
        views_of(maps, SOURCE, TARGET, READ)


def test_places_are_explained_where_there_are_several():
    assert "Encoder: self-attention of the source. Cross: attention of the output to the source." in legend(
        [look(("encoder", 0, 2), ("cross", 0, 2), ("own", 0, 2))]
    )
    assert "Cross:" not in legend([look(("cross", 0, 2))])


def test_the_legend_explains_a_space():
    view = View("self", 0, [0], np.ones((1, 2, 2)) / 2, ["the", " cat"], ["the", " cat"])
    assert "␣ is a space." in legend([Attention("the cat", {}, "", [view])])
    assert "␣" not in legend([Attention("the cat", {}, "", [replace(view, rows=["a", "b"], columns=["a", "b"])])])


def test_plain_data_are_json_with_short_numbers():
    found = json.loads(json.dumps(look(("encoder", 0, 2), ("cross", 1, 1)).to_dict()))
    assert list(found) == ["text", "answer", "views"]
    assert found["answer"] == {"text": "x", "score": -0.5}
    assert [(one["place"], one["layer"], one["heads"]) for one in found["views"]] == [
        ("encoder", 0, [0, 1]),
        ("cross", 1, [0]),
    ]
    assert (
        found["views"][1] | {"rows": TARGET, "columns": SOURCE, "weights": [[[0.333333] * 3] * 2]} == found["views"][1]
    )


def test_one_figure_a_place_with_all_its_layers_and_heads():
    figures = look(("encoder", 0, 2), ("cross", 0, 2), ("encoder", 1, 2), ("cross", 1, 1)).figures("mine")
    assert [re.search(r"<b[^>]*>(.*?)</b>", one)[1] for one in figures] == ["mine: encoder", "mine: cross"]
    maps = [json.loads(re.search(r"<script[^>]*>(.*?)</script>", one)[1])["maps"] for one in figures]
    assert maps == [[[0, 0], [0, 1], [1, 0], [1, 1]], [[0, 0], [0, 1], [1, 0]]]
    assert '<b dir="auto">cross, layer 4</b>' in look(("cross", 4, 1)).figures()[0]


def test_a_notebook_gets_a_whole_page_in_a_frame():
    shown = look(("cross", 0, 1))._repr_html_()
    frame, inner = re.fullmatch(r'<iframe (.*) srcdoc="([^"]*)"></iframe>', shown, re.S).groups()
    assert 'sandbox="allow-scripts"' in frame
    assert "allow-same-origin" not in frame
    page = html.unescape(inner)
    assert page.startswith("<!doctype html>")
    assert "default-src 'none'" in page
    assert int(re.search(r'height="(\d+)"', frame)[1]) < 540  # the map is seen whole
    tall = look(*(("cross", layer, 8) for layer in range(12)))._repr_html_()
    assert 'height="900"' in tall


def test_odd_text_stays_inside_the_frame():
    shown = Attention('"><script>', {}, "</iframe>", look(("cross", 0, 1)).views)._repr_html_()
    assert re.fullmatch(r'<iframe [^<>]* srcdoc="[^"<>]*"></iframe>', shown)
