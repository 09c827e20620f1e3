"""Pages in a real browser: nothing is loaded, nothing is complained of, and pointer and keys do what they promise."""

import io
import json

import numpy as np
import pytest
from PIL import Image

from weft.inspect.attention import Attention, View
from weft.inspect.gradients import Reach
from weft.inspect.look import Reached, render_attention, render_gradients

WIDE, PHONE = (1200, 900), (390, 800)


def looked(words, layers=2, heads=3):
    """Return a look at a model of several heads: each looks at tokens of its own."""
    rng, source = np.random.default_rng(0), [f"word{i}" for i in range(words)]
    target = [*source[::-1], "</s>"]
    views = []
    for place, rows, columns in (("encoder", source, source), ("cross", target, source)):
        for layer in range(layers):
            weights = rng.dirichlet(np.full(len(columns), 0.2), (heads, len(rows)))
            views.append(View(place, layer, list(range(heads)), weights, rows, columns))
    text = " ".join(source)
    return Attention(text, {"text": text}, text, views)


def one_map(words):
    found = looked(words, 1, 1)
    return Attention(found.text, found.answer, found.said, found.views[1:])


def shown(tab, folder, *looks, size=WIDE, dark=False):
    path = folder / "look.html"
    path.write_bytes(render_attention(looks, ".html", "weft look: runs/dates", "seq2seq for translate", print))
    tab.open(path, *size, dark=dark)
    tab.settle()


def box(tab, selector):
    return tab.run(f"(({{x, y, width, height}}) => [x, y, width, height])({one(selector)}.getBoundingClientRect())")


def one(selector):
    return f"document.querySelector({json.dumps(selector)})"


def data(tab, figure=0):
    return json.loads(tab.run(f"document.querySelectorAll('figure script')[{figure}].textContent"))


def told(tab):
    return tab.run(f"{one('.tip')}.textContent")


def point_at(tab, row, column):
    """Put the pointer on a cell of the first map."""
    at = data(tab)
    left, top, *_ = box(tab, ".map svg")
    tab.point(left + at["left"] + (column + 0.5) * at["cell"], top + at["top"] + (row + 0.5) * at["cell"])


def tiles(tab):
    return tab.run(f"{one('[data-tiles]')}.innerHTML")


def chosen(tab):
    return tab.run("[...document.querySelector('.picks').querySelectorAll('select')].map((one) => Number(one.value))")


def sideways(tab):
    """By how much the page can be scrolled to the side."""
    return tab.run("document.documentElement.scrollWidth - innerWidth")


# Nothing is loaded, and nothing is complained of.


def test_pages_ask_for_nothing_and_nothing_is_complained_of(tab, tmp_path):
    looks = [looked(5), one_map(5), one_map(60)]
    shown(tab, tmp_path, *looks)
    assert tab.asked_for == [(tmp_path / "look.html").as_uri()]
    point_at(tab, 1, 1)
    tab.press("Tab", "Enter", "ArrowDown")
    assert tab.complaints == []
    reached = Reached("a b", [Reach(name, "text", ["a", "b"], [0.01, 1.0]) for name in ("elman", "lstm")])
    (tmp_path / "reach.html").write_bytes(render_gradients([reached], ".html", "gradients", "", print))
    tab.open(tmp_path / "reach.html")
    tab.point(500, 400)
    assert "steps back" in told(tab)
    assert tab.complaints == []
    assert tab.asked_for == [(tmp_path / "reach.html").as_uri()]


@pytest.mark.parametrize(
    ("added", "refused"),
    [
        ("<script>document.title = 'taken'</script>", "Executing inline script violates"),
        ('<script src="https://example.org/x.js"></script>', "Loading the script"),
        ('<img src="https://example.org/x.png">', "Loading the image"),
        ('<p style="color: red">x</p>', "Applying inline style violates"),
    ],
)
def test_what_is_foreign_is_refused_by_the_page_itself(tab, tmp_path, added, refused):
    page = render_attention([one_map(3)], ".html", "own", "", print).decode()
    (tmp_path / "foreign.html").write_text(page.replace("</main>", f"{added}</main>"))
    tab.open(tmp_path / "foreign.html")
    assert any(refused in complaint for complaint in tab.complaints), tab.complaints
    assert tab.run("document.title") == "own"
    (tmp_path / "plain.html").write_text(f"<title>own</title><body>{added}</body>")
    assert not any(refused in complaint for complaint in tab.open(tmp_path / "plain.html").complaints)


# The pointer and the keys.


def test_hovering_tells_the_weight_and_marks_its_row_and_column(tab, tmp_path):
    look = one_map(5)
    shown(tab, tmp_path, look)
    for row, column in ((0, 0), (2, 4), (5, 1)):
        point_at(tab, row, column)
        weight = float(np.float16(look.weights[row, column]))
        assert told(tab) == f"{look.target[row]} ← {look.source[column]} {weight:.3f}"
        words = tab.run("[...document.querySelectorAll('text.on')].map((one) => one.textContent)")
        assert words == [look.source[column], look.target[row]]
        assert tab.run("document.querySelectorAll('[data-mark][visibility=visible]').length") == 3
    tab.point(2, 2)
    assert told(tab) == ""
    assert tab.run("document.querySelectorAll('text.on, [data-mark][visibility=visible]').length") == 0


def test_arrow_keys_move_from_cell_to_cell(tab, tmp_path):
    look = one_map(5)
    shown(tab, tmp_path, look)
    tab.press("Tab")
    assert told(tab).startswith(f"{look.target[0]} ← {look.source[0]} ")
    tab.press("ArrowRight", "ArrowRight", "ArrowDown", "ArrowLeft")
    assert told(tab).startswith(f"{look.target[1]} ← {look.source[1]} ")
    tab.press("End", *["ArrowDown"] * 9)
    assert told(tab).startswith(f"{look.target[5]} ← {look.source[4]} ")
    tab.press("Home")
    assert told(tab).startswith(f"{look.target[5]} ← {look.source[0]} ")
    tab.press("Escape")
    assert told(tab) == ""


def test_layer_and_head_are_chosen_by_the_keyboard(tab, tmp_path):
    look = looked(5)
    shown(tab, tmp_path, look)
    first = tiles(tab)
    tab.press("Tab", "Tab")
    assert tab.run("document.activeElement.parentElement.textContent").startswith("layer")
    tab.press("ArrowDown")
    assert chosen(tab) == [1, 0]
    tab.press("Tab", "ArrowDown", "ArrowDown")
    assert chosen(tab) == [1, 2]
    assert tiles(tab) != first
    point_at(tab, 3, 2)
    assert told(tab).endswith(f" {float(np.float16(look.views[1].weights[2, 3, 2])):.3f}")
    peak = float(np.float16(look.views[1].weights[2].max()))
    assert float(tab.run(f"{one('.peak')}.textContent")) == pytest.approx(peak, rel=0.05)
    spoken = tab.run("document.querySelectorAll('.hidden td.weight')[17].textContent")
    assert float(spoken) == pytest.approx(look.views[1].weights[2, 3, 2], abs=2e-3)
    tab.press("ArrowUp", "ArrowUp")
    tab.run("document.querySelector('.picks select').focus()")
    tab.press("ArrowUp")
    assert chosen(tab) == [0, 0]
    assert tiles(tab) == first, "what the script draws is what was drawn for it"


def test_the_overview_shows_every_head_and_opens_one(tab, tmp_path):
    shown(tab, tmp_path, looked(5))
    first, thumbs = tiles(tab), "[...document.querySelector('.heads').querySelectorAll('canvas')]"
    assert tab.run("document.querySelector('.heads').querySelectorAll('button').length") == 6
    tab.until(f"new Set({thumbs}.map((one) => one.toDataURL())).size === 6")
    tab.press("Tab", "ArrowRight", "ArrowRight", "ArrowDown")
    assert tab.run("document.activeElement.ariaLabel") == "layer 1, head 2"
    assert tiles(tab) == first
    tab.press("Enter")
    assert chosen(tab) == [1, 2]
    assert tiles(tab) != first
    assert tab.run("document.activeElement.classList.contains('map')")
    assert told(tab).startswith("word0 ← word0 ")
    tab.press("Escape")
    assert tab.run("document.activeElement.ariaLabel") == "layer 1, head 2"
    assert tab.run("document.activeElement.ariaPressed") == "true"
    x, y, width, height = box(tab, ".heads button")
    tab.point(x + width / 2, y + height / 2, click=True)
    assert chosen(tab) == [0, 0]
    assert tiles(tab) == first


def test_layers_without_heads_stand_in_a_row(tab, tmp_path):
    shown(tab, tmp_path, looked(4, layers=3, heads=1))
    assert tab.run("document.querySelector('.heads').tBodies[0].rows.length") == 1
    assert tab.run("document.querySelector('.picks').querySelectorAll('select').length") == 1
    tab.press("Tab", "ArrowRight", "Enter")
    assert chosen(tab) == [1]


def test_heads_that_are_not_there_leave_a_gap(tab, tmp_path):
    full = looked(4)
    pruned = View("encoder", 1, [1], full.views[1].weights[1:2], full.views[1].rows, full.views[1].columns)
    shown(tab, tmp_path, Attention(full.text, full.answer, full.said, [full.views[0], pruned]))
    assert tab.run("document.querySelector('.heads').querySelectorAll('button').length") == 4
    tab.press("Tab", "ArrowDown", "ArrowRight", "ArrowDown", "Enter")
    assert chosen(tab) == [1, 1]
    tab.run("document.querySelectorAll('.picks select')[1].focus()")
    tab.press("ArrowDown")
    assert chosen(tab) == [0, 2], "layer 1 has no head 2"
    assert "layer 0, head 2" in tab.run(f"{one('.plot')}.ariaLabel")


def test_weights_arrive_as_numpy_has_them(tab, tmp_path):
    shown(tab, tmp_path, one_map(2))
    known = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(float)
    read = tab.run("Array.from({ length: 65536 }, (_, bits) => half(bits)).map((one) => isNaN(one) ? null : one)")
    np.testing.assert_array_equal(
        [np.nan if one is None else one for one in read], np.where(np.isinf(known), np.nan, known)
    )


# Sizes, colours, and elsewhere.


@pytest.mark.parametrize("size", [WIDE, PHONE], ids=["wide", "phone"])
@pytest.mark.parametrize("words", [5, 60])
def test_five_and_sixty_words_fit(tab, tmp_path, words, size):
    shown(tab, tmp_path, one_map(words), looked(words), size=size)
    assert sideways(tab) == 0
    assert tab.run(f"{one('.plot')}.scrollWidth - {one('.plot')}.clientWidth > 0") == (words == 60 and size == PHONE)
    labels = "[...document.querySelectorAll('.plot [data-label]')]"
    assert min(tab.run(f"{labels}.map((one) => parseFloat(getComputedStyle(one).fontSize))")) >= 11
    places = tab.run(f"{labels}.slice({words}, {2 * words + 1}).map((one) => one.getBoundingClientRect().y)")
    assert min(np.diff(places)) >= 12, "the words of the first map's rows do not touch"


def test_a_page_that_is_too_wide_is_caught(tab, tmp_path):
    shown(tab, tmp_path, one_map(60), size=PHONE)
    tab.run(f"{one('.plot')}.style.maxWidth = 'none'")
    assert sideways(tab) > 100


def test_words_stay_in_sight_when_a_large_map_is_scrolled(tab, tmp_path):
    look = one_map(60)
    shown(tab, tmp_path, look, size=PHONE)
    tab.press("Tab", "End", *["ArrowDown"] * 60)
    assert told(tab).startswith(f"</s> ← {look.source[-1]} ")
    tab.settle()
    last = "[...document.querySelectorAll('text.on')].map((one) => one.getBoundingClientRect())"
    for x, y, right, bottom in tab.run(f"{last}.map((one) => [one.left, one.top, one.right, one.bottom])"):
        assert 0 <= x < right <= PHONE[0]
        assert 0 <= y < bottom <= PHONE[1]
    tab.run("document.querySelectorAll('[data-stick]').forEach((one) => one.removeAttribute('transform'))")
    assert min(min(one) for one in tab.run(f"{last}.map((one) => [one.left, one.top])")) < 0


def test_dark_mode_has_its_own_colours(tab, tmp_path):
    def colours():
        heat, ground = (f"getComputedStyle({one(name)}).fill" for name in (".heat", ".ground"))
        thumb = "document.querySelector('.heads canvas').toDataURL()"
        return tab.run(f"[getComputedStyle(document.body).backgroundColor, {heat}, {ground}, {thumb}]")

    shown(tab, tmp_path, looked(5))
    tab.until("document.querySelector('.heads canvas').getContext('2d').getImageData(0, 0, 5, 5).data.some(Boolean)")
    light = colours()
    assert light == colours()
    tab.dark(True)
    tab.until(f"document.querySelector('.heads canvas').toDataURL() !== {json.dumps(light[3])}")
    assert all(one != other for one, other in zip(light, colours(), strict=True))
    shown(tab, tmp_path, looked(5), dark=True)
    assert np.asarray(Image.open(io.BytesIO(tab.picture())).convert("L")).mean() < 60


@pytest.mark.parametrize(("sandbox", "runs"), [("allow-scripts", True), ("", False)])
def test_a_notebook_shows_it_in_a_frame_where_its_script_runs(tab, tmp_path, sandbox, runs):
    frame = one_map(5)._repr_html_().replace('sandbox="allow-scripts"', f'sandbox="{sandbox}"')
    (tmp_path / "notebook.html").write_text(f"<!doctype html><style>p {{ color: red }}</style>{frame}")
    tab.open(tmp_path / "notebook.html")
    tab.settle()
    before, changed = tab.picture(), False
    for step in range(20 if runs else 5):  # the frame is a document of its own, and may take its time
        tab.point(250 + step, 300)
        tab.settle()
        changed = changed or tab.picture() != before
    assert changed == runs


def test_a_page_of_many_heads_is_quick(tab, tmp_path):
    shown(tab, tmp_path, looked(60, layers=12, heads=12))
    assert tab.run("document.querySelectorAll('.heads button').length") == 288
    assert tab.run("performance.timing.domComplete - performance.timing.navigationStart") < 10_000
    assert tab.complaints == []
