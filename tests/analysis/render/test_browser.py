"""Pages in a real browser: nothing is loaded, nothing is complained of, and pointer and keys do what they promise."""

import io
import json
import re

import numpy as np
import pytest
from PIL import Image

from weft.analysis.attention import Attention, View
from weft.analysis.gradient_flow import GradientNorms
from weft.analysis.positions import sinusoidal
from weft.analysis.render.export import TextGradients, render_attention, render_gradients, render_positions
from weft.analysis.render.page import SCRIPT, page

WIDE, PHONE = (1200, 900), (390, 800)


def looked(words, layers=2, heads=3, places=("encoder", "cross")):
    """Return a look at a model of several heads: each looks at tokens of its own."""
    rng, source = np.random.default_rng(0), [f"word{i}" for i in range(words)]
    target = [*source[::-1], "</s>"]
    views = []
    sides = {"encoder": (source, source), "decoder": (["<s>", *target[:-1]],) * 2, "cross": (target, source)}
    for place in places:
        rows, columns = sides[place]
        for layer in range(layers):
            weights = rng.dirichlet(np.full(len(columns), 0.2), (heads, len(rows)))
            views.append(View(place, layer, list(range(heads)), weights, rows, columns))
    text = " ".join(source)
    return Attention(text, {"text": text}, text, views)


def one_map(words):
    found = looked(words, 1, 1)
    return Attention(found.text, found.answer, found.answer_line, found.views[1:])


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
    tab.run(f"{one('.plot')}.scrollIntoView({{block: 'center'}})")  # an overview may stand above a map
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
    reached = TextGradients("a b", [GradientNorms(name, "text", ["a", "b"], [0.01, 1.0]) for name in ("elman", "lstm")])
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
    tab.press("Tab", "Tab", "Tab")  # past the heads of the encoder and of the look across
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


def test_arrow_keys_step_over_heads_that_are_not_there(tab, tmp_path):
    full = looked(4, layers=3, heads=4, places=["encoder"])
    kept = {0: [0, 3], 1: [1, 2], 2: [0, 1, 2]}
    views = [
        View("encoder", one.layer, kept[one.layer], one.weights[kept[one.layer]], one.rows, one.columns)
        for one in full.views
    ]
    shown(tab, tmp_path, Attention(full.text, full.answer, full.answer_line, views))
    tab.press("Tab")
    for key, place in (
        ("ArrowRight", (0, 3)),
        ("ArrowDown", (0, 3)),
        ("Home", (0, 0)),
        ("ArrowLeft", (0, 0)),
        ("ArrowDown", (2, 0)),
        ("End", (2, 2)),
        ("ArrowUp", (1, 2)),
        ("Home", (1, 1)),
    ):
        tab.press(key)
        assert tab.run("document.activeElement.ariaLabel") == "layer {}, head {}".format(*place), key


def test_heads_that_are_not_there_leave_a_gap(tab, tmp_path):
    full = looked(4)
    pruned = View("encoder", 1, [1], full.views[1].weights[1:2], full.views[1].rows, full.views[1].columns)
    shown(tab, tmp_path, Attention(full.text, full.answer, full.answer_line, [full.views[0], pruned]))
    assert tab.run("document.querySelector('.heads').querySelectorAll('button').length") == 4
    tab.press("Tab", "ArrowDown", "ArrowRight", "ArrowDown", "Enter")
    assert chosen(tab) == [1, 1]
    tab.run("document.querySelectorAll('.picks select')[1].focus()")
    tab.press("ArrowDown")
    assert chosen(tab) == [0, 2], "layer 1 has no head 2"
    assert "layer 0, head 2" in tab.run(f"{one('.plot')}.ariaLabel")


# Several places: an overview of all their heads, and one map at a time.

PLACES = ("encoder", "decoder", "cross")
SEEN = "[...document.querySelectorAll('figure:not([hidden]) b')].map((one) => one.textContent)"
PRESSED = "[...document.querySelectorAll('.heads button')].flatMap((one, i) => one.ariaPressed === 'true' ? [i] : [])"


def test_all_heads_of_all_places_stand_in_one_overview(tab, tmp_path):
    shown(tab, tmp_path, looked(5, places=PLACES), looked(4, places=PLACES))
    assert tab.run("document.querySelectorAll('.overview').length") == 2
    tables = "[...document.querySelectorAll('.overview')[0].querySelectorAll('table')]"
    assert tab.run(f"{tables}.map((one) => one.querySelector('caption b').textContent)") == list(PLACES)
    assert tab.run(f"{tables}.map((one) => one.querySelectorAll('button').length)") == [6, 6, 6]
    tops = tab.run(f"{tables}.map((one) => one.getBoundingClientRect().top)")
    assert len(set(tops)) == 1, "they are seen side by side"
    thumbs = "[...document.querySelector('.overview').querySelectorAll('canvas')]"
    tab.until(f"new Set({thumbs}.map((one) => one.toDataURL())).size === 18")
    assert tab.run(SEEN) == ["encoder", "encoder"]
    assert tab.run(PRESSED) == [0, 18]
    assert tab.complaints == []


def test_a_head_of_another_place_takes_the_place_of_the_large_map(tab, tmp_path):
    look = looked(5, places=PLACES)
    shown(tab, tmp_path, look)
    tab.press("Tab", "Tab", "Tab", "ArrowRight", "ArrowDown")
    assert tab.run("document.activeElement.ariaLabel") == "layer 1, head 1"
    assert tab.run(SEEN) == ["encoder"]
    tab.press("Enter")
    assert tab.run(SEEN) == ["cross"]
    assert tab.run(PRESSED) == [16]
    tip = "[...document.querySelectorAll('.tip')].map((one) => one.textContent).join('')"
    weight = float(np.float16(look.views[5].weights[1, 0, 0]))
    assert tab.run(tip) == f"{look.views[5].rows[0]} ← {look.views[5].columns[0]} {weight:.3f}"
    assert tab.run("document.activeElement.ariaLabel").startswith("layer 1, head 1 of cross")
    x, y, right, bottom = tab.run(
        "(({x, y, right, bottom}) => [x, y, right, bottom])(document.activeElement.getBoundingClientRect())"
    )
    assert 0 <= x < right <= WIDE[0]
    assert 0 <= y < bottom <= WIDE[1] + 1
    tab.press("Escape")
    assert tab.run("document.activeElement.ariaLabel") == "layer 1, head 1"
    x, y, width, height = box(tab, ".heads button")
    tab.point(x + width / 2, y + height / 2, click=True)
    assert (tab.run(SEEN), tab.run(PRESSED)) == (["encoder"], [0])


def test_one_place_needs_no_common_overview_and_maps_without_heads_are_all_seen(tab, tmp_path):
    shown(tab, tmp_path, looked(4, places=["encoder"]))
    assert tab.run("[document.querySelector('.overview'), document.querySelectorAll('.choice .heads').length]") == [
        None,
        1,
    ]
    shown(tab, tmp_path, looked(4, 1, 1, PLACES))
    assert tab.run(SEEN) == [f"{place}, layer 0" for place in PLACES]


def test_figures_that_are_not_of_one_look_are_all_seen(tab, tmp_path):
    look = looked(4, places=PLACES)
    (tmp_path / "apart.html").write_text(page("t", look.figures()))
    tab.open(tmp_path / "apart.html")
    assert tab.run(SEEN) == list(PLACES)
    assert tab.run("document.querySelectorAll('.choice .heads').length") == 3


@pytest.mark.parametrize("size", [WIDE, PHONE], ids=["wide", "phone"])
def test_an_overview_of_a_large_model_fits(tab, tmp_path, size):
    shown(tab, tmp_path, looked(30, layers=6, heads=8, places=PLACES), size=size)
    assert sideways(tab) == 0
    *_, width, height = box(tab, ".heads canvas")
    assert min(width, height) >= 30
    if size == WIDE:
        assert box(tab, ".overview")[3] < WIDE[1], "all heads are seen at once"


# Positions.


def positions_shown(tab, folder, size=WIDE, dark=False):
    found = sinusoidal(16, 20)
    (folder / "positions.html").write_bytes(render_positions([found], ".html", "weft look: positions", "", print))
    tab.open(folder / "positions.html", *size, dark=dark)
    tab.settle()
    return found


def pixels(tab, number=0):
    read = "getContext('2d').getImageData(0, 0, one.width, one.height).data"
    one = f"const one = document.querySelectorAll('canvas')[{number}]"
    return np.array(tab.run(f"(() => {{ {one}; return [...one.{read}] }})()")).reshape(-1, 4)


def test_positions_are_painted_and_told(tab, tmp_path):
    found = positions_shown(tab, tmp_path)
    painted = pixels(tab)
    np.testing.assert_allclose(painted[:, 3] / 255, np.abs(found.vectors).ravel(), atol=0.003)
    above, below = (painted[(part.ravel() > 0.1), :3] for part in (found.vectors, -found.vectors))
    assert (above[:, 2] > above[:, 0]).all(), "blue above nought"
    assert (below[:, 2] < below[:, 0]).all(), "and not below"
    left, top, width, height = box(tab, "canvas")
    tab.point(left + 3.5 * width / 16, top + 7.5 * height / 20)
    assert told(tab) == f"position 7, dimension 3: {float(f'{np.float16(found.vectors[7, 3]):.3g}')}".replace("-", "−")
    tab.point(2, 2)
    assert told(tab) == ""
    assert tab.complaints == []
    assert tab.asked_for == [(tmp_path / "positions.html").as_uri()]


def test_positions_are_read_by_the_keyboard(tab, tmp_path):
    found = positions_shown(tab, tmp_path)
    tab.press("Tab", "ArrowDown", "ArrowRight", "ArrowRight", "ArrowLeft")
    assert told(tab) == f"position 1, dimension 1: {float(f'{np.float16(found.vectors[1, 1]):.3g}')}"
    tab.press("End", *["ArrowDown"] * 30)
    assert told(tab).startswith("position 19, dimension 15: ")
    tab.press("Escape")
    assert told(tab) == ""
    tab.press("Tab", "ArrowRight")
    tip = "document.querySelectorAll('.tip')[1].textContent"
    assert tab.run(tip) == f"position 0, position 1: {float(f'{np.float16(found.similarity[0, 1]):.3g}')}"


def test_positions_in_the_dark_and_on_a_phone(tab, tmp_path):
    found = positions_shown(tab, tmp_path)
    light = pixels(tab)
    tab.dark(True)
    tab.until("matchMedia('(prefers-color-scheme: dark)').matches")
    tab.settle()
    assert (
        (pixels(tab)[np.abs(found.vectors).ravel() > 0.5, :3] != light[np.abs(found.vectors).ravel() > 0.5, :3])
        .any(1)
        .all()
    )
    positions_shown(tab, tmp_path, PHONE, dark=True)
    assert sideways(tab) == 0
    assert np.asarray(Image.open(io.BytesIO(tab.picture())).convert("L")).mean() < 100


def test_weights_arrive_as_numpy_has_them(tab):
    half = re.search(r"const half = .*?\n};", SCRIPT, re.DOTALL)[0]  # what a module declares, no other script sees
    known = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(float)
    read = tab.run(f"{half} Array.from({{ length: 65536 }}, (_, bits) => half(bits)).map((x) => isNaN(x) ? null : x)")
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
