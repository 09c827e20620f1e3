"""The report of a comparison: what the page says, that nothing breaks out of it, and how it does in a real browser."""

import csv
import io
import json
import math
import re
from html.parser import HTMLParser

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.compared import classification, language_models, trained, translation, versus

from weft.comparison import answers
from weft.comparison.figures import _merge_seeds, _spans_decades
from weft.comparison.report import report_page, write_report
from weft.comparison.results import (
    AnswerCell,
    AttentionFigures,
    ComparedExample,
    ComparisonResults,
    CurvePoint,
    Entry,
    LengthGroup,
    SeedResult,
    SurprisingText,
)
from weft.comparison.text_files import csv_text, markdown_text
from weft.errors import ConfigError, DataError

SHAPES = {"classification": classification, "translation": translation, "language models": language_models}
NASTY = [
    "<script>alert(1)</script>",
    '" onfocus="alert(1)',
    "a|b\n# c",
    "</style><img src=x>",
    "\x00\ud800",
    "",
    "=1+1",
]


class Words(HTMLParser):
    """The words and the elements of a page."""

    def __init__(self, document):
        super().__init__()
        self.words, self.tags, self.attributes, self.ids = [], [], set(), []
        self.feed(document)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes |= {name for name, _ in attrs}
        self.ids += [value for name, value in attrs if name == "id"]

    def handle_data(self, data):
        self.words.append(data)


def said(results):
    return " ".join(" ".join(Words(report_page(results)).words).split())


def sections(results):
    return re.findall(r"<h2[^>]*>([^<]*)</h2>", report_page(results))


@pytest.mark.parametrize(
    ("shape", "wanted"),
    [
        ("classification", ["Learning curves", "Quality by length of the input", "F1 by label"]),
        ("translation", ["Learning curves", "Quality by length of the input", "Attention"]),
        ("language models", ["Learning curves", "The same text, shaded by surprise"]),
    ],
)
def test_a_page_has_the_sections_that_there_is_something_for(shape, wanted):
    found = sections(SHAPES[shape]())
    assert found[:2] == ["Results", "Quality against cost"]
    assert found[-1] == "What was compared, and how"
    assert [name for name in found[2:-1] if not name.startswith("The same examples")] == wanted
    assert any(name.startswith("The same examples") for name in found) == (shape != "language models")


def test_the_smallest_comparison_has_a_page():
    empty = Entry(name="a", model="rnn", kind="trained")
    assert sections(translation(entries=[empty], examples=[], attention=[])) == [
        "Results",
        "What was compared, and how",
    ]
    failed = Entry(name="a", model="rnn", kind="trained", failure="NaN in the loss")
    assert "failed: NaN in the loss" in said(classification(entries=[failed], examples=[]))


def test_where_there_are_no_test_examples_the_report_says_what_that_means():
    chosen_by = "the validation examples, which also chose the best model of each training"
    for text in (said(classification(split="valid")), markdown_text(classification(split="valid"))):
        assert chosen_by in text
        assert "valid examples" not in text, "they are not said to be right"
    assert chosen_by not in said(classification(split="test"))


def test_the_report_is_made_from_what_is_kept_alone(tmp_path):
    results = classification()
    path = write_report(ComparisonResults.model_validate_json(results.model_dump_json()), tmp_path / "new")
    assert path == tmp_path / "new" / "report.html"
    assert path.read_text(encoding="utf-8") == report_page(results)
    assert sorted(file.name for file in path.parent.iterdir()) == ["comparison.csv", "report.html", "report.md"]
    write_report(results, tmp_path / "new")  # again, in place


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path):
    (tmp_path / "report.html").mkdir()
    with pytest.raises(ConfigError, match=r"report\.html: cannot be written: .*; choose another --out"):
        write_report(translation(), tmp_path)


def test_charts_say_in_words_what_they_show():
    document = report_page(classification())
    described = re.findall(r"<desc>(.*?)</desc>", document, re.S)
    assert len(described) == len(re.findall(r'role="img"', document)) == 4 + 2 * 3 + 1
    assert "langid-cnn: 97.3% at 42 s" in described[0]
    assert described[0].endswith("On the frontier: character n-grams, langid-cnn")


def test_an_entry_looks_the_same_in_all_charts():
    document = report_page(classification())
    hues = set(re.findall(r'<g class="(s\d)"><title>langid-elmo</title>', document))
    assert hues == {"s2"}


def test_costs_that_differ_by_the_end_of_a_step_are_the_same():
    entries = [trained("a", 0.9, 1.0, seeds=(1,)), trained("b", 0.8, 0.998, seeds=(1,))]  # 60 s, and 59.9
    document = report_page(classification(entries=entries))
    assert "against training time" not in document, "a budget of time is what all of them took"
    entries.append(trained("c", 0.7, 0.5, seeds=(1,)))
    described = re.findall(r"<desc>(.*?)</desc>", report_page(classification(entries=entries)), re.S)
    assert described[0].endswith("On the frontier: c, a"), "b was no cheaper than a"


def test_of_many_settings_those_that_most_entries_have_are_written_once():
    own = {f"model.key{i}": i for i in range(9)}
    entries = [trained(name, 0.9, settings=own) for name in "ab"]
    entries.append(trained("c", 0.9, settings={**own, "model.key0": True}))
    table = report_page(classification(entries=entries)).partition("The keys in which")[2]
    rows = dict(re.findall(r"<th[^>]*>([^<]*)</th><td[^>]*>([^<]*)</td>", table))
    assert rows["(most entries)"].startswith("model.key0=0, model.key1=1, ")
    assert (rows["a"], rows["b"], rows["c"]) == ("–", "–", "model.key0=true")


def test_only_a_metric_without_an_upper_bound_has_a_logarithmic_axis():
    assert _spans_decades(language_models(metric="perplexity"), [20.0, 3000.0])
    assert not _spans_decades(language_models(metric="perplexity"), [20.0, 300.0])
    assert not _spans_decades(translation(metric="bleu"), [0.6, 30.0])


def test_the_budget_chooses_what_is_shown_first():
    def first(results):
        return re.findall(r'for="loss-0">([^<]*)<', report_page(results))

    assert [first(shape()) for shape in SHAPES.values()] == [["by seconds"], ["by steps"], ["by operations"]]


def test_seeds_are_averaged_where_all_have_reported():
    def curve(*points):
        return [CurvePoint(step=step, seconds=step, loss=loss) for step, loss in points]

    def run(seed, points):
        return SeedResult(seed=seed, metrics={"accuracy": 0.5}, seconds=1, curve=points)

    both = [run(1, curve((1, 4.0), (2, 2.0), (3, 1.0))), run(2, curve((1, 2.0), (2, None), (3, 0.5)))]
    take = (lambda point: point.step, lambda point: point.loss)
    entry = Entry(name="a", model="rnn", kind="trained", runs=both)
    assert _merge_seeds(entry, *take) == [(1, 3.0, 2.0, 4.0), (3, 0.75, 0.5, 1.0)]
    apart = [run(1, curve((1, 4.0), (3, 2.0))), run(2, curve((2, 3.0), (4, 1.0)))]
    alone = _merge_seeds(entry.model_copy(update={"runs": apart}), *take)
    assert alone == [(1, 4.0, 4.0, 4.0), (3, 2.0, 2.0, 2.0)]


def test_examples_on_which_entries_disagree_come_first():
    document = report_page(classification())
    assert document.index("Das Weben") < document.index("Der Schuss") < document.index("Het was")
    assert "3 test examples; the entries disagree on 1 of them, shown first." in said(classification())


def test_the_same_answer_is_written_once_with_all_who_gave_it():
    example = report_page(classification()).partition("Das Weben")[2].partition("</div>")[0]
    items = [" ".join(Words(item).words) for item in example.split("<li>")[1:]]
    assert items == [
        "✓ right:  german langid-cnn, langid-bilstm, langid-elmo",
        "✗ wrong:  english langid-bert",
        "✗ wrong:  dutch langid-word2vec, bag of words",
    ]


def test_many_examples_and_classes_open_on_demand():
    example = translation().examples[0]
    many = translation(examples=[example.model_copy(update={"text": f"text {i}"}) for i in range(11)])
    assert "3 more examples" in said(many)
    entry = trained("a", 0.9, classes={f"label{i}": (0.5, i) for i in range(35)})
    assert "5 more" in said(classification(entries=[entry], examples=[]))


def test_the_best_f1_of_each_class_is_marked():
    table = report_page(classification()).partition("F1 by label</h2>")[2].partition("</table>")[0]
    french = next(row for row in table.split("<tr>") if "french" in row)
    assert french.count("<strong>98.0%") == 2  # as good


def test_surprise_is_shaded_by_bits_per_character():
    pieces = {"pydoc-gpt": [("abcd ", 10.0), ("ef", 0.0)], "pydoc-gru": [(char, 2.0) for char in "abcd ef"]}
    pieces["no entry"] = [("abcd ef", 3.0)]
    text = SurprisingText(text="abcd ef", pieces=pieces)
    document = report_page(language_models(surprising=[text]))
    assert '<span class="b9" data-value="10.00 bits">abcd </span><span data-value="0.00 bits">ef</span>' in document
    assert document.count('<span class="b9" data-value="2.00 bits">') == 7
    assert "14 bits, 2.00 per character; most for “a” 2.0" in document
    assert "no entry" not in document


def test_only_figures_that_weft_draws_are_taken():
    good = translation().attention[0]
    for bad in (
        "<img src=x>",
        '<div onclick="alert(1)"></div>',
        "<script>alert(1)</script>",
        '<svg><a href="x"></a></svg>',
        '<meta http-equiv="refresh">',
    ):
        figures = AttentionFigures(entry="dates-additive", text=good.text, figures=[*good.figures, bad])
        with pytest.raises(DataError, match="attention figures of 'dates-additive' must be those that weft draws"):
            report_page(translation(attention=[figures]))


def texts():
    return st.sampled_from(NASTY) | st.text(max_size=12)


VALUES = st.none() | st.sampled_from([0.0, 1e-300, 1e300, math.inf, math.nan, -1.0]) | st.floats(0, 1)
COUNTS = st.none() | st.integers(0, 10**18)


@st.composite
def comparisons(draw):
    names = draw(st.lists(texts(), min_size=1, max_size=4, unique=True))
    points = st.builds(
        CurvePoint, step=st.integers(0, 50), seconds=st.floats(0, 1e9), flops=VALUES, loss=VALUES, valid=VALUES
    )
    runs = st.builds(
        SeedResult,
        seed=st.integers(0, 9),
        metrics=st.fixed_dictionaries({"accuracy": VALUES, "f1": VALUES}),
        seconds=st.floats(0, 1e300),
        tokens_per_s=VALUES,
        mfu=VALUES,
        peak_memory=COUNTS,
        flops=VALUES,
        curve=st.lists(points, max_size=4),
    )
    groups = st.builds(
        LengthGroup, shortest=st.integers(0, 3), longest=st.integers(3, 9), examples=st.integers(0, 9), value=VALUES
    )
    entries = [
        Entry(
            name=name,
            model=draw(texts()),
            kind=draw(st.sampled_from(["trained", "fitted", "baseline"])),
            settings=draw(st.dictionaries(texts(), texts() | VALUES, max_size=10)),
            parameters=draw(COUNTS),
            disk_bytes=draw(COUNTS),
            latency_p50=draw(VALUES),
            throughput=draw(VALUES),
            runs=draw(st.lists(runs, max_size=3)),
            lengths=draw(st.lists(groups, max_size=3)),
            classes=draw(st.dictionaries(texts(), st.tuples(st.floats(), st.integers(0, 9)), max_size=3)),
            failure=draw(st.none() | texts()),
            versus_best=draw(st.none() | st.just(versus(-0.1, 0.3)) | st.just(versus(math.nan, math.nan))),
        )
        for name in names
    ]
    cells = st.builds(AnswerCell, text=texts(), correct=st.sampled_from([True, False, None]))
    answered = st.dictionaries(st.sampled_from(names), cells)
    examples = st.builds(ComparedExample, text=texts(), expected=texts(), answers=answered)
    pieces = st.lists(st.tuples(texts(), st.floats()), max_size=4)
    surprising = st.builds(SurprisingText, text=texts(), pieces=st.dictionaries(st.sampled_from(names), pieces))
    return classification(
        entries=entries,
        metric=draw(st.sampled_from(["accuracy", "perplexity"])),
        budget=draw(texts()),
        machine=draw(st.dictionaries(texts(), texts(), max_size=2)),
        positive_label=draw(st.none() | texts()),
        examples=draw(st.lists(examples, max_size=3)),
        surprising=draw(st.lists(surprising, max_size=2)),
    )


TAGS = {
    "a",
    "b",
    "body",
    "canvas",
    "caption",
    "dd",
    "desc",
    "details",
    "div",
    "dl",
    "dt",
    "figcaption",
    "figure",
    "fieldset",
    "g",
    "h1",
    "h2",
    "h3",
    "head",
    "header",
}
TAGS |= {
    "html",
    "input",
    "label",
    "legend",
    "li",
    "main",
    "meta",
    "p",
    "path",
    "rect",
    "script",
    "span",
    "strong",
    "style",
    "summary",
    "svg",
    "circle",
}
TAGS |= {"table", "tbody", "td", "text", "th", "thead", "title", "tr", "ul"}
ATTRIBUTES = {
    "aria-hidden",
    "aria-label",
    "charset",
    "checked",
    "class",
    "content",
    "cx",
    "cy",
    "d",
    "data-mark",
    "data-value",
    "dir",
    "dy",
    "for",
}
ATTRIBUTES |= {
    "fill-opacity",
    "height",
    "http-equiv",
    "id",
    "lang",
    "name",
    "r",
    "role",
    "scope",
    "stroke-dasharray",
    "tabindex",
    "text-anchor",
}
ATTRIBUTES |= {"transform", "type", "viewbox", "visibility", "width", "x", "y"}


@settings(deadline=None, derandomize=True, max_examples=40)
@given(comparisons())
def test_no_name_and_no_number_breaks_the_page(results):
    found = Words(report_page(results))
    assert set(found.tags) <= TAGS - {"a"}
    assert found.attributes <= ATTRIBUTES
    assert found.tags.count("style") == 1
    assert len(found.ids) == len(set(found.ids))
    table = next(line for line in markdown_text(results).splitlines() if line.startswith("| ---"))
    columns = table.count("---")
    lines = list(markdown_text(results).partition("| ---")[2].split("\n\n")[0].splitlines()[1:])
    assert all(len(re.findall(r"(?<!\\)\|", line)) == columns + 1 for line in lines)
    rows = list(csv.reader(io.StringIO(csv_text(results))))
    assert {len(row) for row in rows} == {len(rows[0])}


def test_a_name_that_is_not_escaped_is_caught(monkeypatch):
    monkeypatch.setattr(answers, "escaped", str)
    example = classification().examples[0].model_copy(update={"text": NASTY[0], "expected": NASTY[3]})
    found = Words(report_page(classification(examples=[example])))
    assert not set(found.tags) <= TAGS


def test_markdown_has_the_table_the_examples_and_the_machine():
    text = markdown_text(classification())
    assert "| langid-cnn | cnn | 97.3% ± 0.4 |" in text
    assert "| Das Weben ist eine alte Kunst | german | ✗ english | langid-bert |" in text
    assert "- processor: a CPU with AVX2" in text
    assert "a\\|b" in markdown_text(translation(budget="a|b"))


def test_the_csv_file_has_a_row_a_training_with_all_digits():
    rows = list(csv.DictReader(io.StringIO(csv_text(classification()))))
    assert len(rows) == 5 * 3 + 2 + 1
    cnn = [row for row in rows if row["entry"] == "langid-cnn"]
    assert [row["seed"] for row in cnn] == ["1", "2", "3"]
    runs = next(entry for entry in classification().entries if entry.name == "langid-cnn").runs
    assert [float(row["accuracy"]) for row in cnn] == [run.metrics["accuracy"] for run in runs]
    assert rows[-1]["failure"].startswith("out of memory")
    assert rows[-1]["accuracy"] == ""


@pytest.mark.parametrize("name", ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "\r=1"])
def test_no_text_in_the_csv_file_is_a_formula_to_a_spreadsheet(name):
    failed = Entry(name=name, model=name, kind="trained", failure=name)
    worse = trained("plain", -0.25, metric="matthews")
    rows = list(
        csv.DictReader(io.StringIO(csv_text(classification(metric="matthews", entries=[failed, worse])), newline=""))
    )
    assert [rows[-1][key] for key in ("entry", "model", "failure")] == ["'" + name] * 3
    assert [row["entry"] for row in rows[:3]] == ["plain"] * 3
    assert float(rows[0]["matthews"]) == worse.runs[0].metrics["matthews"] < 0, "a number stays one"


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reports")
    return {name: write_report(shape(), folder / name) for name, shape in SHAPES.items()}


@pytest.mark.parametrize("name", SHAPES)
def test_in_a_browser_nothing_is_loaded_and_nothing_complained_of(tab, pages, name):
    tab.open(pages[name])
    assert tab.complaints == []
    assert tab.asked_for == [pages[name].as_uri()]
    assert tab.violations() == []
    tab.dark(True)
    tab.run("document.querySelectorAll('details').forEach((part) => { part.open = true; })")
    tab.settle()
    assert tab.violations() == []
    tab.ask("Emulation.setDeviceMetricsOverride", width=390, height=800, deviceScaleFactor=1, mobile=False)
    tab.settle()
    assert tab.run("document.documentElement.scrollWidth") <= 390
    assert tab.complaints == []


def visible_panels(tab):
    return tab.run("[...document.querySelectorAll('.panel')].filter((one) => one.offsetHeight).length")


def test_print_is_light_and_shows_all_panels_and_details(tab, pages):
    tab.open(pages["classification"], dark=True)
    assert visible_panels(tab) == 3
    tab.ask("Emulation.setEmulatedMedia", media="print", features=[{"name": "prefers-color-scheme", "value": "dark"}])
    tab.settle()
    assert visible_panels(tab) == 4 + 3 + 3
    assert tab.run("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert tab.run(
        "[...document.querySelectorAll('details')].every((one) => one.querySelector('table').offsetHeight > 9)"
    )
    tab.ask("Emulation.setEmulatedMedia", media="")


def test_the_keyboard_chooses_a_panel_and_reads_the_values(tab, pages):
    tab.open(pages["classification"])
    tab.run("document.querySelector('#cost-0').focus()")
    tab.press("ArrowRight")
    assert tab.run("document.querySelector('#cost-1').checked")
    tab.press("Tab")
    tab.settle()
    tip = "document.querySelectorAll('#cost-1 ~ .panel .tip')[1].textContent"
    assert tab.run("document.activeElement.className") == "plot lines"
    assert tab.run(tip) == "parameterslangid-bert 93.4% at 6,480,000"
    tab.press("Home")
    assert "41,200" in tab.run(tip)


def test_the_keyboard_and_the_pointer_read_a_shaded_text(tab, pages):
    tab.open(pages["language models"])
    first = language_models().surprising[0].pieces["pydoc-gpt"]
    tab.run("document.querySelector('.shaded').scrollIntoView({block: 'center'})")
    tip = "document.querySelector('.reading .tip').textContent"
    box = json.loads(tab.run("JSON.stringify(document.querySelector('.shaded span').getBoundingClientRect())"))
    tab.point(box["x"] + 3, box["y"] + 3)
    tab.settle()
    assert tab.run(tip) == f"{first[0][0]} — {first[0][1]:.2f} bits"
    tab.run("document.querySelector('.shaded').focus()")
    tab.press("ArrowRight", "ArrowRight")
    assert tab.run(tip).endswith(f" — {first[2][1]:.2f} bits")
    tab.press("Escape")
    assert tab.run(tip) == ""


def test_lengths_without_a_value_have_no_scale():
    results = language_models()
    groups = [LengthGroup(shortest=n, longest=n, examples=3, value=None) for n in (1, 2)]
    entries = [entry.model_copy(update={"lengths": groups}) for entry in results.entries]
    assert "bits per byte" in report_page(results.model_copy(update={"entries": entries}))
