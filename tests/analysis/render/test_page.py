import base64
import hashlib
import json
import re
from html.parser import HTMLParser

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.analysis.render import charts, heatmaps, matrix_plots, page, scatter, shaded_text, svg
from weft.errors import DataError

quick = settings(deadline=None, derandomize=True, max_examples=30)
NASTY = [
    "<img src=x onerror=alert(1)>",
    '" onload="alert(1)',
    "' onfocus='alert(1)",
    "</script><script>alert(1)</script>",
    "</title></style><b>",
    "<!--",
    "]]>",
    "&lt;b&gt;&#60;b&#62;",
    "\u2028\u2029",
    "\x00\x0b\x1b\ud800\ufffe",
    " ",
    "\n\t",
    "",
]
texts = (
    st.sampled_from(NASTY) | st.text("<>&\"'`/=!- scriptonad\n\x00\u2028\ud800;#", max_size=24) | st.text(max_size=24)
)
several = st.lists(texts, min_size=12, max_size=12, unique=True)

ATTRIBUTES = {"aria-hidden", "aria-label", "charset", "class", "content", "cx", "cy", "d", "data-label", "data-mark"}
ATTRIBUTES |= {"checked", "data-stick", "data-tiles", "data-value", "for", "id"}
ATTRIBUTES |= {"dir", "dy", "fill-opacity", "height", "http-equiv", "lang", "name", "r", "role", "scope", "tabindex"}
ATTRIBUTES |= {"stroke-dasharray", "text-anchor", "transform", "type", "viewbox", "visibility", "width", "x", "y"}


class Outline(HTMLParser):
    """A document as a list of tags, with its attributes and what is between the tags of scripts, styles and titles."""

    def __init__(self, document: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str | None]] = []
        self.inside: dict[str, list[str]] = {"script": [], "style": [], "h1": [], "td": [], "th": [], "strong": []}
        self.types: list[str | None] = []
        self.other: list[str] = []
        self.open = ""
        self.feed(document)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.open = tag
        self.attributes += [(tag, name, value) for name, value in attrs]
        if tag in self.inside:
            self.inside[tag].append("")
        if tag == "script":
            self.types.append(dict(attrs).get("type"))

    def handle_endtag(self, tag):
        self.tags.append("/" + tag)
        self.open = ""

    def handle_data(self, data):
        if self.open in self.inside:
            self.inside[self.open][-1] += data

    def handle_comment(self, data):
        self.other.append(data)

    def handle_pi(self, data):
        self.other.append(data)

    def unknown_decl(self, data):
        self.other.append(data)


def twelve(word: str) -> list[str]:
    return [f"{word}{i}" for i in range(12)]


def everything(words: list[str]) -> str:
    """A page with one of `words` in every place that takes text."""
    a, b, c, d, e, f, g, h, i, j, k, m = words
    parts = [
        page.heading(a),
        page.paragraph(b),
        page.cards({c: d, d: 1.5}),
        page.table([e, f], [[g, 1.5], [h, i]], best={(1, 0), (0, 1)}),
        page.details(j, [page.paragraph(k)]),
        charts.line_chart({a: [(0, 1.0), (1, 2.0)], b: [(0, 2.0)], c: []}, d, e, title=f, percent=True),
        charts.line_chart({m: [(0, 1.0), (3, 2.0)]}, m, m, log_y=True),
        charts.line_chart({}, m, m, title=g),
        page.answer_html(f),
        heatmaps.alignment(np.eye(2, 3), [a, b, c], [d, e], title=h),
        heatmaps.alignments(np.ones((2, 15, 20)), [(0, 0), (1, 0)], [i] * 20, [j] * 15, k),
        matrix_plots.MatrixPlot(h, np.eye(3, 4), j, k).html(),
        page.subheading(a),
        page.caption(b, "figure"),
        page.panels("p", c, {f"1{d}": e, f"2{e}": page.paragraph(f)}).replace(f">{e}<", "><"),
        scatter.scatter_chart({f: scatter.ScatterPoint(1, 1, 0.5), g: scatter.ScatterPoint(2, 3)}, h, i, frontier=[f]),
        shaded_text.shaded_text([(j, 1.0), (k, 0.0)], m, a, 2.0, b),
        shaded_text.scale(2.0, c),
    ]
    return page.page(m, parts, subtitle=a)


def breach(words: list[str]) -> str:
    """Name the way in which `words` broke out of their places, if any did."""
    document = everything(words)
    found, plain = Outline(document), Outline(everything([f"w{i}" if word else "" for i, word in enumerate(words)]))
    if found.other:
        return f"a comment or a declaration: {found.other}"
    if found.tags != plain.tags:
        return "other elements than with plain words"
    if strange := {name for _, name, _ in found.attributes} - ATTRIBUTES:
        return f"attributes {strange}"
    if found.inside["script"][-1] != page.SCRIPT or found.types[-1] != "module" or "module" in found.types[:-1]:
        return "a script"
    if found.inside["style"] != [page.STYLE]:
        return "a style"
    for data in found.inside["script"][:-1]:
        json.loads(data)
    document.encode()
    return ""


@quick
@given(several)
def test_no_text_breaks_out_of_its_place(words: list[str]) -> None:
    assert breach(words) == ""


@pytest.mark.parametrize("word", NASTY)
def test_no_nasty_text_breaks_out_of_any_place(word: str) -> None:
    assert breach(twelve(word)) == ""


def test_text_that_is_not_escaped_is_caught(monkeypatch) -> None:
    monkeypatch.setattr(page, "escaped", str)
    assert "elements" in breach(twelve("<i>"))
    monkeypatch.undo()
    monkeypatch.setattr(svg, "escaped", lambda text: text.replace("<", "&lt;"))
    assert "attributes" in breach(twelve('" onload="x'))
    monkeypatch.undo()
    monkeypatch.setattr(svg, "encode_data", json.dumps)
    assert breach(twelve("</script><i>")) != ""


@quick
@given(texts)
def test_text_arrives_as_it_was_given(text: str) -> None:
    printable = re.sub("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufdd0-\ufdef\ufffe\uffff]", "\ufffd", text)
    assert Outline(page.page(text, [])).inside["h1"] == [printable]


def policy_holds(document: str) -> bool:
    """Whether the document's own policy lets its style and its script run."""
    found = Outline(document)
    policy = next(
        value for tag, name, value in found.attributes if tag == "meta" and name == "content" and "src" in value
    )
    running = [
        *found.inside["style"],
        *[s for s, kind in zip(found.inside["script"], found.types, strict=True) if kind in (None, "module")],
    ]
    digests = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in running]
    return policy.startswith("default-src 'none'; ") and all(f"'sha256-{digest}'" in policy for digest in digests)


def test_the_policy_allows_this_style_and_script_and_nothing_else() -> None:
    document = everything(twelve("w"))
    assert policy_holds(document)
    assert not policy_holds(document.replace("const moves =", 'fetch("/"); const moves ='))
    assert not policy_holds(document.replace("</main>", "<script>alert(1)</script></main>"))
    assert "unsafe" not in document


def test_a_page_loads_nothing() -> None:
    document = everything(twelve("w"))
    assert not re.search(r"https?:|//[a-z]|url\(|@import|@font-face|\bsrc=|\bhref=|fetch\(|XMLHttp|import\(", document)


def test_a_page_serves_dark_mode_phones_and_keyboards() -> None:
    document = page.page("t", [page.table(["a"], [[1]]), charts.line_chart({"a": [(0, 1)]}, "x", "y")])
    assert "prefers-color-scheme: dark" in document
    assert 'name="viewport" content="width=device-width' in document
    assert '<html lang="en">' in document
    assert ":focus-visible" in document
    assert document.count('tabindex="0"') == 2


def test_every_colour_is_defined_in_light_and_in_dark() -> None:
    light, dark = page.STYLE.split("@media screen and (prefers-color-scheme: dark)")
    dark = dark[: dark.index("} }")]
    named = set(re.findall(r"var\((--[a-z0-9]+)\)", page.STYLE)) - {"--hue"}
    assert named == set(re.findall(r"(--[a-z0-9]+): #", light)) == set(re.findall(r"(--[a-z0-9]+): #", dark))


def test_the_same_page_is_the_same_bytes() -> None:
    assert everything(twelve("w")) == everything(twelve("w"))


def test_an_empty_title_still_names_the_tab() -> None:
    assert "<title>weft</title>" in page.page("", [])


def test_a_table_writes_numbers_for_reading_and_lines_up_their_digits() -> None:
    made = page.table(["model", "score", "size"], [["a", 0.5, 1_234_567], ["b", 0.9712, 12], ["c", None, 3]])
    assert Outline(made).inside["td"] == ["0.5000", "1,234,567", "0.9712", "12", "–", "3"]
    assert made.count('class="number"') == 2 + 6
    assert Outline(made).inside["th"] == ["model", "score", "size", "a", "b", "c"]


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (True, "yes"),
        (float("nan"), "–"),
        (float("inf"), "inf"),
        (1e-7, "1e-07"),
        (12345.678, "12,346"),
        (np.float32(0.25), "0.25"),
        (np.int64(4096), "4,096"),
        ("plain", "plain"),
    ],
)
def test_a_card_shows(value: object, shown: str) -> None:
    assert f">{shown}</dd>" in page.cards({"k": value})


def test_quantities_in_words_are_right_aligned_and_names_are_not() -> None:
    assert page.table(["n", "t"], [["a", "12.5 s"], ["b", "1,200 MB"], ["c", "97%"]]).count('class="number"') == 4
    assert 'class="number"' not in page.table(["n", "t"], [["a", "12.5 s"], ["b", "3 January 2018"]])


def test_the_best_of_a_column_stands_out_to_eye_and_ear() -> None:
    made = page.table(["model", "score"], [["a", 1], ["b", 2]], best={(1, 1)})
    assert Outline(made).inside["strong"] == ["2"]
    assert '2<span class="hidden"> (best)</span></strong>' in made


def test_a_row_of_the_wrong_length_is_named() -> None:
    with pytest.raises(DataError, match="row 1 must have 2 cells, one a header: got 1"):
        page.table(["a", "b"], [[1, 2], [3]])


def test_a_table_without_rows_is_a_table() -> None:
    assert Outline(page.table(["a"], [])).inside["th"] == ["a"]
