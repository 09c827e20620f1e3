"""The task and the columns that a file is for."""

import re

import pytest

from weft.config.sections import Data
from weft.config.yaml import read_yaml
from weft.data.profile import profile_source
from weft.data.proposal import propose, write_section
from weft.errors import DataError

N = range(12)
STSB = "".join(f"main-news\tMSR\t2012\t{n:04}\t{n % 5}.250\tA man no. {n} walks.\tA man {n} goes.\n" for n in N)
MRPC = "Quality\t#1 ID\t#1 String\t#2 String\n" + "".join(
    f'{n % 2}\t{70 + n}\tHe said "no" {n} times.\tHe said no {n}.\n' for n in N
)
SICK = "pair_ID\tsentence_A\tsentence_B\trelatedness_score\tentailment_judgment\n" + "".join(
    f"{n}\tA man no. {n} walks.\tA man {n} goes.\t{n / 4}\t{'NEUTRAL' if n % 3 else 'ENTAILMENT'}\n" for n in N
)
COLA = "".join(f"gj04\t{n % 2}\t{'*' if n % 2 == 0 else ''}\tThe sailors rode no. {n}.\n" for n in N)
REVIEWS = "review;stars\n" + "".join(f"A film, no. {n};{n % 3}\n" for n in N)
PAIRS = "".join(f"good day {n}\tbonjour {n}\n" for n in N)
TOKENS = "".join(f"He{n} PRP B-NP\nruns{n} VBZ B-VP\n\n" for n in N)
SPANS = "".join(f'{{"question": "Who {n}?", "context": "It is me {n}.", "answers": ["me"]}}\n' for n in N)
SNLI = "".join(
    f'{{"gold_label": "{"yes" if n % 2 else "no"}", "sentence1": "A man {n} walks.", "sentence2": "He {n} runs."}}\n'
    for n in N
)
CODAH = "".join(f"o\tA man no. {n} walks and\tgoes {n} on.\tsits {n} down.\truns {n} off.\t{n % 3}\n" for n in N)
SWAG = ",sent1,ending0,ending1,label\n" + "".join(f"{n},A man {n} is,by the {n}.,on the {n}.,{n % 2}\n" for n in N)
HELLASWAG = "".join(
    f'{{"ctx": "A man {n} walks", "label": {n % 3}, "endings": ["on {n}.", "off {n}.", "in {n}."]}}\n' for n in N
)
WINOGRANDE = "sentence,option1,option2,answer\n" + "".join(
    f"A man {n} and _ walk.,the cat {n},the dog {n},{1 + n % 2}\n" for n in N
)
DOCUMENTS = "".join(f"A title\nA man {n} walks.\nHe goes on {n} times.\nHe sits.\n\n" for n in N)
FILES = {
    "CODAH": ("a.tsv", CODAH, "choice", {"columns": {"text": 1, "choices": [2, 3, 4], "label": 5}}),
    "SWAG": (
        "a.csv",
        SWAG,
        "choice",
        {"columns": {"text": "sent1", "choices": ["ending0", "ending1"], "label": "label"}},
    ),
    "HellaSwag": (
        "a.jsonl",
        HELLASWAG,
        "choice",
        {"columns": {"text": "ctx", "choices": "endings", "label": "label"}},
    ),
    "documents": ("a.txt", DOCUMENTS, "mlm", {"documents": "blank"}),
    "STS-B": ("a.csv", STSB, "classify", {"format": "tsv", "columns": {"text": 5, "pair": 6, "label": 4}}),
    "MRPC": ("a.tsv", MRPC, "classify", {"columns": {"text": "#1 String", "pair": "#2 String", "label": "Quality"}}),
    "SICK": (
        "a.txt",
        SICK,
        "classify",
        {"format": "tsv", "columns": {"text": "sentence_A", "pair": "sentence_B", "label": "entailment_judgment"}},
    ),
    "SNLI": (
        "a.jsonl",
        SNLI,
        "classify",
        {"columns": {"text": "sentence1", "pair": "sentence2", "label": "gold_label"}},
    ),
    "CoLA": ("a.tsv", COLA, "classify", {"columns": {"text": 3, "label": 1}}),
    "reviews": ("a.csv", REVIEWS, "classify", {"delimiter": ";", "columns": {"text": "review", "label": "stars"}}),
    "pairs": ("fra.txt", PAIRS, "translate", {"format": "tsv", "columns": {"text": 0, "target": 1}}),
    "tokens": ("a.txt", TOKENS, "tag", {"format": "conll", "columns": {"words": 0, "tags": 2}}),
    "prose": ("a.txt", "It was a day.\nIt was a night, too.\n", "lm", {}),
    "spans": (
        "a.jsonl",
        SPANS,
        "span",
        {"columns": {"question": "question", "passage": "context", "answers": "answers"}},
    ),
}


@pytest.fixture
def profiled(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def read(name, content):
        (tmp_path / name).write_text(content)
        return profile_source(name, Data(train="x"))

    return read


@pytest.mark.parametrize("case", FILES)
def test_the_task_the_columns_and_the_section_to_paste(profiled, case):
    name, content, task, section = FILES[case]
    profile = profiled(name, content)
    proposal = propose(profile)
    assert proposal.task == task
    assert proposal.options == ({"regression": True} if case == "STS-B" else {})
    proposed = proposal.data_section(profile, {"train": name})
    assert proposed == {"train": name, **section}
    assert read_yaml(write_section("data", proposed), "x") == {"data": proposed}
    Data(**proposed)


def test_a_task_that_is_given_chooses_the_columns(profiled):
    profile = profiled("a.tsv", MRPC)
    assert propose(profile, "translate").columns == {"text": "#1 String", "target": "#2 String"}
    assert set(propose(profile, "lm").columns) == {"text"}


@pytest.mark.parametrize("first", [1, "A", "a"])
def test_choices_may_be_counted_from_one_or_by_letters(profiled, first):
    names = {"1": str(first), "2": str(2 if first == 1 else chr(ord(first) + 1))}
    proposal = propose(profiled("a.csv", re.sub("([12])$", lambda match: names[match[1]], WINOGRANDE, flags=re.M)))
    assert (proposal.task, proposal.options) == ("choice", {"first": first})
    assert proposal.columns == {"text": "sentence", "choices": ["option1", "option2"], "label": "answer"}


def test_labels_that_do_not_count_the_choices_are_not_taken_for_such(profiled):
    profile = profiled("a.csv", re.sub("1$", "3", WINOGRANDE, flags=re.M))
    assert propose(profile).task == "classify"
    with pytest.raises(DataError, match="choice needs a text, choices .* and the number or letter of the right one"):
        propose(profile, "choice")


@pytest.mark.parametrize(
    ("text", "section"),
    [
        ("A man walks.\nHe sits.\n" * 9, {}),
        ("A man\n\nwalks and\n\n" * 9, {}),
        ("To be, or not to be\nThat is the question,\nWhether it is nobler\n\n" * 9, {"documents": "blank"}),
    ],
)
def test_lines_without_documents_of_sentences_are_for_a_language_model(profiled, text, section):
    profile = profiled("a.txt", text)
    assert propose(profile).task == "lm"
    assert propose(profile).data_section(profile, {"train": "a.txt"}) == {"train": "a.txt", **section}


def test_columns_that_a_task_lacks_are_told(profiled):
    profile = profiled("a.txt", "one text\nand another\n")
    with pytest.raises(DataError, match=r"a.txt: classify needs a column of text and one of labels .* 0 \(text\)"):
        propose(profile, "classify")
    with pytest.raises(DataError, match=r"--task: nothing can be proposed for 'clasify'; did you mean 'classify'"):
        propose(profile, "clasify")


def test_comments_stand_in_one_column_but_for_long_lines():
    section = write_section("data", {"a": 1, "bcd": 2, "long": "x" * 50, "e": 3}, {"a": "first", "bcd": "second"})
    assert section.splitlines() == ["data:", "  a: 1    # first", "  bcd: 2  # second", f"  long: {'x' * 50}", "  e: 3"]


def test_yaml_quotes_what_yaml_would_read_as_something_else():
    section = {"train": "my data, 1.csv", "delimiter": "\t", "columns": {"text": "#1", "label": "no", "pair": "1"}}
    assert read_yaml(write_section("data", section), "x") == {"data": section}
