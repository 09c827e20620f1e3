"""The nearest contexts of a word, against a search that encodes each text alone and compares all; and the command."""

import json
import sys

import pytest
import torch
from tests.models.test_elmo import SMALL
from torch.nn import functional as F

from weft.analysis import contextual_neighbours as neighbours
from weft.analysis.contextual_neighbours import Neighbour, NeighbourSearch
from weft.cli.main import main
from weft.config.run import Run
from weft.errors import DataError, RoleError
from weft.pipeline import Pipeline
from weft.tasks.char_inputs import Spelling
from weft.tasks.factory import build
from weft.tokenization.trainable import train_tokenizer
from weft.tokens import Tokens, char_ids

TEXT = "he went to see a play"
CORPUS = [
    "the play was long and the actors were tired",
    "a play in two acts",
    "Play the ball , and play it well",
    "they display what players play with",
    "nothing here",
    "we went to see a new play , a short one",
    "to play is to win",
]
PLACED = [(f"c:{number}", line) for number, line in enumerate(CORPUS, 1)]
MODELS = {
    "elmo": {"name": "elmo", **SMALL},
    "rnn": {"name": "rnn", "direction": "both", "apart": True, "width": 8, "layers": 2},
    "chars": {"name": "rnn", "direction": "both", "width": 8, "chars": 5},
    "gpt": {"name": "gpt", "width": 8, "heads": 2, "layers": 2, "max_positions": 64},
}


def made(model, tokenizer="words", longest=64, train="none.txt"):
    labels = {"name": "classify", "labels": ["a", "b"]}
    raw = {
        "task": labels if model == "chars" else {"name": "lm"},
        "data": {"train": train, "max_length": longest},
        "tokenizer": {"name": tokenizer, **({"size": 300} if tokenizer == "bpe" else {"min_count": 2})},
        "model": MODELS[model],
        "train": {"steps": 1},
    }
    run = Run.parse(raw)
    torch.manual_seed(0)
    return run, *build(run, train_tokenizer(run.tokenizer, iter(CORPUS)))


def vectors(task, head, text, word, layers=(-1,)):
    """Return what a word has in a text, use by use, with nothing else in the batch."""
    cut, special = task.tokenizer.encode(text), task.tokenizer.specials
    tokens = Tokens.pack([[special.bos, *cut.ids, special.eos]])
    if task.uses_chars:
        tokens = tokens.with_chars([torch.cat([torch.from_numpy(one) for one in spelt(task, text, cut)]).numpy()])
    with torch.no_grad():
        states = torch.cat(list(head.eval().body.encode(tokens, layers)), -1)
    low, at, found = text.lower(), -1, []
    while (at := low.find(word, at + 1)) >= 0:
        end = at + len(word)
        alone = not (low[at - 1 : at].isalnum() if at else False) and not low[end : end + 1].isalnum()
        inside = [n + 1 for n, (a, b) in enumerate(cut.offsets) if a < end and b > at]
        found += [states[inside].mean(0)] if alone else []
    return found


def spelt(task, text, cut):
    if task.config.name == "lm":
        return Spelling.of(task.tokenizer).of_texts([text])[0]
    return [char_ids([word]) for word in ("", *(text[a:b].strip() for a, b in cut.offsets), "")]


def by_hand(task, head, layers=(-1,)):
    (own,) = vectors(task, head, TEXT, "play", layers)
    found = [
        (float(F.cosine_similarity(own, one, dim=0)), place)
        for place, line in PLACED
        for one in vectors(task, head, line, "play", layers)
    ]
    return sorted(found, reverse=True)


def search(task, head, top=10, layers=(-1,), longest=64):
    return NeighbourSearch(task, head, longest, layers).nearest(TEXT, "play", iter(PLACED), top)


@pytest.mark.parametrize("tokenizer", ["words", "bpe", "characters"])
@pytest.mark.parametrize("model", MODELS)
def test_the_nearest_are_those_of_a_search_by_hand(model, tokenizer):
    _, task, head = made(model, tokenizer)
    found, must = search(task, head), by_hand(task, head)
    assert found.uses == len(must) == 7
    assert [one.similarity for one in found.nearest] == pytest.approx([near for near, _ in must], abs=1e-5)
    assert sorted(one.place for one in found.nearest) == sorted(place for _, place in must)


def test_layers_are_laid_side_by_side():
    _, task, head = made("elmo")
    for layers in ((0,), (1, 2)):
        found = search(task, head, layers=layers)
        must = by_hand(task, head, layers)
        assert [one.similarity for one in found.nearest] == pytest.approx([near for near, _ in must], abs=1e-5)
    spelling = search(task, head, layers=(0,))
    assert spelling.nearest[0].similarity == pytest.approx(1), "the spelling alone knows no context"


def test_only_the_best_are_kept_and_little_is_held(monkeypatch):
    _, task, head = made("elmo")
    whole, sizes, vectors_of = search(task, head), [], NeighbourSearch._vectors

    def watched(self, uses):
        sizes.append(sum(len(use.ids) for use in uses))
        return vectors_of(self, uses)

    monkeypatch.setattr(neighbours, "BATCH_TOKENS", 20)
    monkeypatch.setattr(NeighbourSearch, "_vectors", watched)
    few = search(task, head, top=3)
    assert max(sizes) <= 20 < sum(sizes)
    assert few.uses == whole.uses
    assert [one.place for one in few.nearest] == [one.place for one in whole.nearest][:3]
    assert [one.similarity for one in few.nearest] == pytest.approx([one.similarity for one in whole.nearest[:3]])


def test_a_long_text_is_read_around_the_word():
    _, task, head = made("elmo", longest=12)
    long = " ".join(["and so on"] * 30)
    finder = NeighbourSearch(task, head, 12)
    (use,) = finder._uses("p", f"{long} went to see a play , {long}", "play")
    assert len(use.ids) == 12
    assert 4 <= use.span[0] <= 7, "with as much before it as after"
    (first,), (last,) = finder._uses("p", f"play {long}", "play"), finder._uses("p", f"{long} play", "play")
    assert (first.span, last.span) == ((1, 2), (10, 11))
    assert len(first.ids) == len(last.ids) == 12
    assert use.shown[1].startswith("… ")
    assert use.shown[3].endswith(" …")
    assert use.shown[2] == "play"


def test_what_reads_the_same_is_there_once_and_the_text_itself_is_not():
    _, task, head = made("elmo")
    corpus = [*PLACED, *((f"again:{number}", line) for number, line in enumerate(CORPUS)), ("own", TEXT)]
    found = NeighbourSearch(task, head, 64).nearest(TEXT, "play", corpus)
    assert found.uses == 14
    assert len(found.nearest) == 7
    assert "own" not in {one.place for one in found.nearest}


def test_what_cannot_be_found_is_said():
    _, task, head = made("elmo")
    with pytest.raises(DataError, match="--word: 'pla' is not in 'he went"):
        NeighbourSearch(task, head, 64).nearest(TEXT, "pla", PLACED)
    with pytest.raises(DataError, match="--word: 'went' is not in the corpus"):
        NeighbourSearch(task, head, 64).nearest(TEXT, "went", PLACED[:2])


def test_a_model_that_does_not_encode_is_refused():
    run = Run.parse({"task": {"name": "lm"}, "data": {"train": "none.txt"}, "tokenizer": {"name": "words"},
                     "model": {"name": "ngram"}, "train": {"steps": 1}})  # fmt: skip
    with pytest.raises(RoleError, match="'ngram', as configured, gives words no vectors"):
        NeighbourSearch(*build(run, train_tokenizer(run.tokenizer, iter(CORPUS))), 64)


def test_a_neighbour_as_data():
    one = Neighbour(0.123456789, "f:1", "a", "b", "c")
    assert one.to_dict() == {"similarity": 0.123457, "place": "f:1", "before": "a", "word": "b", "after": "c"}


# The command.


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("neighbours")
    (folder / "text.txt").write_text("\n".join(CORPUS) + "\n", encoding="utf-8")
    (folder / "other.txt").write_text("a <b>play</b> is what I see\n\nno such word\n", encoding="utf-8")
    run, task, head = made("elmo", train=str(folder / "text.txt"))
    Pipeline(run, task, task.tokenizer, head).save(folder / "run")
    return folder


@pytest.fixture
def run(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)

    def look(*arguments):
        monkeypatch.setattr(sys, "argv", ["weft", "look", "neighbours", str(folder / "run"), *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            main()
        return end.value.code, *capsys.readouterr()

    return look


def test_the_training_text_is_the_corpus_unless_one_is_named(run, folder, tmp_path):
    assert run(TEXT, "--word", "play", "-o", "n.json", "--top", "3") == (0, "n.json\n", "")
    found = json.loads((tmp_path / "n.json").read_text(encoding="utf-8"))
    assert (found["word"], found["uses"], len(found["nearest"])) == ("play", 7, 3)
    assert found["nearest"][0]["place"].startswith(str(folder / "text.txt"))
    assert run(TEXT, folder / "other.txt", "--word", "play", "-o", "n.json")[0] == 0
    found = json.loads((tmp_path / "n.json").read_text(encoding="utf-8"))
    assert [one["place"] for one in found["nearest"]] == [f"{folder / 'other.txt'}:1"]


def test_they_are_a_page(run, folder, tmp_path):
    assert run(TEXT, folder / "other.txt", "--word", "play", "-o", "n.html")[0] == 0
    page = (tmp_path / "n.html").read_text(encoding="utf-8")
    assert "a &lt;b&gt;" in page, "what a corpus says is text"
    assert f'<h2 dir="auto">{TEXT}</h2>' in page
    assert "stands 1 times" not in page


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([TEXT], "has several words; name one, such as --word"),
        ([TEXT, "--word", "play", "-o", "n.png"], "--out: must end in .html or .json for neighbours"),
        ([TEXT, "--word", "play", "--top", "0"], "--top: must be 1 or more"),
        ([TEXT, "--word", " "], "--word: must be a word of the text, but is empty"),
        ([TEXT, "--word", "play", "--layers", "7"], "layers: this elmo has 0"),
        ([TEXT, "nowhere.txt", "--word", "play"], "nowhere.txt"),
    ],
)
def test_mistakes_are_named(run, arguments, message):
    code, _, output = run(*arguments)
    assert code == 2
    assert message in output
