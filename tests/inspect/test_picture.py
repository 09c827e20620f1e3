"""Pictures by matplotlib: whatever the tokens are, nothing is warned of, and what no font has is told."""

import io

import numpy as np
import pytest
from PIL import Image

from weft.inspect import picture
from weft.inspect.attention import Attention, View
from weft.inspect.picture import Pen, draw_lines, draw_maps


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
    monkeypatch.setattr(picture, "_characters", lambda family: frozenset(map(chr, range(32, 127))))
    notices = []
    pen = Pen.for_texts(["an語", "e\u0301"], notices.append)
    assert [pen.shown("語"), pen.shown("e\u0301"), pen.shown("an")] == ["□", "e", "an"]
    assert notices == [
        "no installed font has 語: they are drawn as boxes; install one (on Debian: fonts-noto-cjk, fonts-noto-core, "
        "fonts-symbola), or look at the .html"
    ]
    Pen.for_texts(["plain"], notices.append)
    assert len(notices) == 1


def test_another_font_is_taken_where_the_first_lacks_something(monkeypatch):
    known = {"DejaVu Sans": frozenset("abc"), "DejaVu Serif": frozenset("xyz")}
    monkeypatch.setattr(picture, "_characters", lambda family: known.get(family, frozenset()))
    assert picture._fonts_for(set("abx")) == (["DejaVu Sans", "DejaVu Serif"], set())
    assert picture._fonts_for(set("ab")) == (["DejaVu Sans"], set())


def test_one_map_has_words_and_many_are_small():
    words = [f"word{i}" for i in range(8)]
    one, many = drawn(draw_maps([look(words)], print)), drawn(draw_maps([look(words, 3, 4)], print))
    assert one.shape != many.shape
    assert blue(many) > 0.01


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
