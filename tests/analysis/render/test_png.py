"""Pictures by matplotlib: whatever the tokens are, nothing is warned of, and what no font has is told."""

import io

import numpy as np
import pytest
from PIL import Image

from weft.analysis.attention import Attention, View
from weft.analysis.render import png
from weft.analysis.render.matrix_plots import MatrixPlot
from weft.analysis.render.png import Fonts, draw_lines, draw_maps, draw_matrices


def look(tokens, layers=1, heads=1):
    weights = np.random.default_rng(0).dirichlet(np.ones(len(tokens)), (heads, len(tokens)))
    views = [View("self", layer, list(range(heads)), weights, tokens, tokens) for layer in range(layers)]
    return Attention(" ".join(tokens), {}, "an answer", views)


def drawn(content):
    return np.asarray(Image.open(io.BytesIO(content)).convert("RGB"))


def blue(image):
    """The share of strongly blue pixels."""
    return float((image[..., 2].astype(int) - image[..., 0] > 60).mean())


@pytest.mark.parametrize(
    "tokens",
    [
        ["中文", "日本語", "한국어"],
        ["😀", "👩\u200d👩\u200d👧", "❤\ufe0f"],
        ["مرحبا", "שלום", "नमस्ते"],
        ["$x$", "\\frac{", "_^{$"],
        ["", " ", "\n", "\x00", "\ud800", "\U0010ffff"],
        ["a" * 500, "b"],
    ],
    ids=["cjk", "emoji", "scripts", "mathematics", "shapeless", "long"],
)
def test_any_token_is_drawn_without_a_warning(tokens):
    notices = []
    image = drawn(draw_maps([look(tokens)], notices.append))
    assert blue(image) > 0.01
    assert max(image.shape) < 4000
    assert all("no installed font has" in notice for notice in notices)


def test_what_no_font_has_is_told_and_becomes_a_box(monkeypatch):
    monkeypatch.setattr(png, "_characters", lambda family: frozenset(map(chr, range(32, 127))))
    notices = []
    fonts = Fonts.for_texts(["an語", "e\u0301"], notices.append)
    assert [fonts.displayable("語"), fonts.displayable("e\u0301"), fonts.displayable("an")] == ["□", "e", "an"]
    assert notices == [
        "no installed font has 語: they are drawn as boxes; install one (on Debian: fonts-noto-cjk, fonts-noto-core, "
        "fonts-symbola), or look at the .html"
    ]
    Fonts.for_texts(["plain"], notices.append)
    assert len(notices) == 1


def test_another_font_is_taken_where_the_first_lacks_something(monkeypatch):
    known = {"DejaVu Sans": frozenset("abc"), "DejaVu Serif": frozenset("xyz")}
    monkeypatch.setattr(png, "_characters", lambda family: known.get(family, frozenset()))
    assert png._fonts_for(set("abx")) == (["DejaVu Sans", "DejaVu Serif"], set())
    assert png._fonts_for(set("ab")) == (["DejaVu Sans"], set())


def test_one_map_has_words_and_many_are_small():
    words = [f"word{i}" for i in range(8)]
    one, many = drawn(draw_maps([look(words)], print)), drawn(draw_maps([look(words, 3, 4)], print))
    assert one.shape != many.shape
    assert blue(many) > 0.01


def places(*heads):
    """Return a look at three places, each with these heads of its layers."""
    weights = np.random.default_rng(0).dirichlet(np.ones(4), (4, 4))
    found = [
        View(place, layer, own, weights[own], list("abcd"), list("abcd"))
        for place in ("encoder", "decoder", "cross")
        for layer, own in enumerate(heads)
    ]
    return Attention("a b c d", {}, "an answer", found)


def test_heads_that_are_left_out_leave_a_gap_and_take_no_words_with_them():
    whole = drawn(draw_maps([places([0, 1, 2, 3], [0, 1, 2, 3])], print))
    pruned = drawn(draw_maps([places([1, 2], [0, 1, 3])], print))
    assert pruned.shape == whole.shape
    assert (pruned < 128).all(-1).sum() == pytest.approx((whole < 128).all(-1).sum(), rel=0.02), "titles and numbers"
    assert blue(pruned) < 0.8 * blue(whole)


def test_places_of_one_look_stand_under_one_title():
    one, three = (
        drawn(draw_maps([look(list("abcd"), 2, 4)], print)),
        drawn(draw_maps([places(*[[0, 1, 2, 3]] * 2)], print)),
    )
    assert three.shape[0] < 2.9 * one.shape[0]
    assert drawn(draw_maps([places(*[[0, 1, 2, 3]] * 2)] * 2, print)).shape[0] > 1.9 * three.shape[0]


def test_grids_are_drawn_in_two_hues_only_where_there_are_two_signs():
    values = np.linspace(-1, 1, 12).reshape(3, 4)
    signed, unsigned = (drawn(draw_matrices([MatrixPlot("t", v, "r", "c")], print)) for v in (values, values + 1))
    orange = [float((image[..., 0].astype(int) - image[..., 2] > 60).mean()) for image in (signed, unsigned)]
    assert orange[0] > 0.1
    assert orange[1] == 0
    assert min(blue(signed), blue(unsigned)) > 0.1
    assert drawn(draw_matrices([MatrixPlot("t", values, "r", "c")] * 2, print)).shape[0] > 1.8 * signed.shape[0]


def test_sixty_words_are_large_enough_to_read():
    image = drawn(draw_maps([look([f"word{i}" for i in range(60)])], print))
    assert min(image.shape[:2]) >= 60 * 20  # pixels a cell


def test_looks_stand_below_one_another():
    one = drawn(draw_maps([look(["a", "b"])], print))
    both = drawn(draw_maps([look(["a", "b"])] * 2, print))
    assert both.shape[0] > 1.6 * one.shape[0]


def test_lines_are_drawn_for_each_chart():
    lines = {"$a$": [(0, 1.0), (1, 1e-9)], "中": [(0, 1.0), (1, 0.5)], "none": []}
    one, two = (drawn(draw_lines(charts, "x", "y", print)) for charts in ({"t": lines}, {"t": lines, "u": lines}))
    assert two.shape[0] > 1.6 * one.shape[0]
    assert blue(one) > 0.0005
