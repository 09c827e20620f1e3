"""Embeddings initialized from word vectors: which rows, how the others are scaled, and when."""

import json
import sys

import numpy as np
import pytest
import torch
from tests.notices import Told
from torch import nn

import weft
from weft.config.recipes import read_recipe
from weft.config.run import Run
from weft.config.schema import Named
from weft.models.base import Model, Role
from weft.tasks.factory import build, make_task, resolve_run
from weft.tasks.prepare import fit_tokenizer
from weft.tasks.pretrained_embeddings import check_vectors, learn_words, start_from_vectors
from weft.tokenization.trainable import train_tokenizer
from weft.training.run import train_run

TEXTS = ["the cat sat", "The dog sat down", "a cat and a dog", "down the unheard lane"]
WORDS = ["the", "cat", "sat", "dog", "down", "a", "and", "elsewhere"]
WIDTH = 6


@pytest.fixture
def vectors(tmp_path):
    rng = np.random.default_rng(0)
    path = tmp_path / "tiny.6d.txt"
    path.write_text("".join(f"{word} {' '.join(f'{x:.5f}' for x in rng.normal(0, 0.3, WIDTH))}\n" for word in WORDS))
    return path


@pytest.fixture
def rows(vectors):
    """Return each word's vector."""
    lines = (line.split(" ") for line in vectors.read_text().splitlines())
    return {word: torch.tensor([float(number) for number in numbers]) for word, *numbers in lines}


@pytest.fixture
def recipe(tmp_path, vectors):
    path = tmp_path / "rows.tsv"
    path.write_text("".join(f"{text}\t{'odd' if number % 2 else 'even'}\n" for number, text in enumerate(TEXTS)))
    return {
        "task": {"name": "classify"},
        "data": {"train": str(path)},
        "tokenizer": {"name": "words"},
        "model": {"name": "rnn", "width": 8, "embedding": WIDTH, "vectors": str(vectors)},
        "train": {"steps": 2, "batch_tokens": 64},
    }


def parsed(recipe, *overrides):
    return Run.parse(read_recipe(recipe, overrides))


def started(recipe, *overrides):
    """Return the tokenizer, the weights before and after, and the report."""
    run = parsed(recipe, *overrides)
    run = resolve_run(run, make_task(run))
    tokenizer = fit_tokenizer(run.tokenizer, run.data, make_task(run))
    torch.manual_seed(0)
    model = build(run, tokenizer)[1].body
    before = model.embed.weight.detach().clone()
    report = start_from_vectors(run, tokenizer, model)
    return tokenizer, before, model.embed.weight.detach(), report


def test_words_of_the_file_get_their_rows_and_the_others_keep_theirs_in_its_scale(recipe, rows):
    tokenizer, before, after, report = started(recipe)
    tokens = [tokenizer.token(id) for id in range(len(tokenizer))]
    known = [id for id, token in enumerate(tokens) if token.lower() in rows]
    assert {tokens[id] for id in known} == {*WORDS, "The"} - {"elsewhere"}
    for id in known:
        assert torch.equal(after[id], rows[tokens[id].lower()])
    others = [id for id in range(len(tokens)) if id not in known]
    ratio = after[known].std(correction=0) / before.std(correction=0)
    assert {"unheard", "lane", "<unk>", "<s>", "</s>"} == {tokens[id] for id in others}
    torch.testing.assert_close(after[others], before[others] * ratio)
    assert ratio < 0.6  # the negative control: they did change
    assert report == (
        f"model.vectors: 8 of {len(tokens)} rows from tiny.6d.txt; 8 of the 10 words of the training data have one"
    )


def test_without_the_key_nothing_is_done(recipe):
    _, before, after, report = started(recipe, "model.vectors=null")
    assert report is None
    assert torch.equal(before, after)


def test_a_start_of_zeros_stays_where_the_file_says_nothing(recipe, rows, monkeypatch):
    monkeypatch.setattr(nn.Embedding, "reset_parameters", lambda self: nn.init.zeros_(self.weight))
    tokenizer, _, after, _ = started(recipe)
    assert after.isfinite().all()
    assert not after[tokenizer.specials.eos].any()


# Which tokens are words


@pytest.mark.parametrize(
    ("section", "mark"),
    [
        ({"name": "wordpiece", "size": 60}, ""),
        ({"name": "bpe", "size": 300}, " "),
        ({"name": "bpe", "size": 40, "bytes": False}, " "),
        ({"name": "unigram", "size": 32}, " "),
    ],
    ids=["wordpiece", "bytes", "characters", "unigram"],
)
def test_of_sub_words_those_that_are_whole_words_match(recipe, rows, section, mark):
    recipe["data"]["train"] = write_often(recipe["data"]["train"])
    recipe["tokenizer"] = section
    tokenizer, before, after, report = started(recipe)
    tokens = [tokenizer.token(id) for id in range(len(tokenizer))]
    whole = [id for id, token in enumerate(tokens) if token.lower() in {mark + word for word in rows}]
    assert whole
    for id in whole:
        assert torch.equal(after[id], rows[tokens[id].strip().lower()])
    rest = [id for id in range(len(tokens)) if id not in whole]
    assert any(tokens[id].removeprefix("##") in rows for id in rest)  # spelt as a word, but a piece, such as "a"
    moved = (after / before)[rest]
    torch.testing.assert_close(moved, moved[:1, :1].expand_as(moved))  # only scaled
    assert report.startswith(f"model.vectors: {len(whole)} of {len(tokens)} rows from tiny.6d.txt; ")
    assert report.endswith("of the tokens are whole words, the others can have none")


def write_often(path):
    """Repeat the texts, so that whole words are worth a token."""
    with open(path, encoding="utf-8") as file:
        text = file.read()
    often = path.replace("rows", "often")
    with open(often, "w", encoding="utf-8") as file:
        file.write(text * 20)
    return often


@pytest.mark.parametrize("name", ["characters", "bytes"])
def test_a_tokenizer_without_words_is_refused_with_the_remedy(recipe, name):
    recipe["tokenizer"] = {"name": name}
    with pytest.raises(weft.ConfigError, match=rf"none of the .* tokens of tokenizer '{name}' is a word of .*tiny.6d"):
        started(recipe)
    with pytest.raises(weft.ConfigError, match=r"set tokenizer: \{name: words\}"):
        started(recipe)


def test_a_file_of_other_words_is_refused(recipe, vectors):
    vectors.write_text(f"</s>{' 0.5' * WIDTH}\nkatze{' 0.25' * WIDTH}\n")  # what is special says nothing
    with pytest.raises(weft.ConfigError, match="none of the 10 tokens .* is it for another language"):
        train_run(parsed(recipe), vectors.parent / "run")  # though its words are known too by then
    with pytest.raises(weft.ConfigError, match="is it for another language"):
        started(recipe)


# What does not fit


def test_vectors_beside_pretrained_weights_are_refused(recipe, tmp_path):
    recipe["model"] |= {"name": "rnn", "width": WIDTH, "weights": str(tmp_path / "gone")}
    recipe["model"].pop("kernels", None)
    with pytest.raises(
        weft.ConfigError, match=r"model.vectors: the embeddings are those of model.weights, .*leave one"
    ):
        check_vectors(parsed(recipe))
    del recipe["model"]["weights"]
    check_vectors(parsed(recipe))


def test_another_width_is_refused_with_both_numbers(recipe, tmp_path):
    for change in ("model.embedding=5", "model.embedding=null"):
        with pytest.raises(
            weft.ConfigError, match=r"have 6 numbers, and model.embedding is \d; set model.embedding: 6"
        ):
            train_run(parsed(recipe, change), tmp_path / change)


def test_a_file_that_does_not_fit_is_found_before_a_tokenizer_is_trained(recipe, tmp_path, monkeypatch):
    monkeypatch.setattr("weft.training.run.fit_tokenizer", lambda *_: pytest.fail("too late"))
    with pytest.raises(weft.ConfigError, match="have 6 numbers, and model.embedding is 5"):
        train_run(parsed(recipe, "model.embedding=5"), tmp_path / "wide")
    with pytest.raises(weft.DataError, match="nowhere.txt: there is no such file"):
        train_run(parsed(recipe, "model.vectors=nowhere.txt"), tmp_path / "lost")


def test_a_model_without_the_key_refuses_it(recipe):
    with pytest.raises(weft.ConfigError, match="model.vectors: unknown key"):
        parsed({**recipe, "model": {"name": "bert", "vectors": "x"}})


class Bare(Model):
    """A user's own model that takes the key and has nothing to put vectors in."""

    class Config(Named):
        vectors: str | None = None

    width = 4

    @classmethod
    def roles(cls, config):
        return frozenset({Role.ENCODER})


def test_a_model_of_ones_own_must_have_an_embedding(recipe, vectors, monkeypatch):
    monkeypatch.setitem(sys.modules, "bare_model", sys.modules[__name__])
    recipe["model"] = {"name": "bare_model:Bare", "vectors": str(vectors)}
    run = parsed(recipe)
    tokenizer = train_tokenizer(run.tokenizer, TEXTS)
    with pytest.raises(weft.ConfigError, match="has no `embed` that is an nn.Embedding"):
        start_from_vectors(run, tokenizer, Bare(run.model, len(tokenizer)))


# When


def test_a_fresh_training_starts_from_them_and_says_so(recipe, rows, tmp_path):
    report = Told()
    train_run(parsed(recipe), tmp_path / "run", report=report)
    assert [text for text in report.notices if "vectors" in text] == [
        "model.vectors: 9 of 14 rows from tiny.6d.txt; 8 of the 10 words of the training data have one"
    ]
    first = weft.load(tmp_path / "run" / "checkpoints" / "step-00000000", device="cpu")
    cat = next(id for id in range(len(first.tokenizer)) if first.tokenizer.token(id) == "cat")
    assert torch.equal(first.head.body.embed.weight[cat], rows["cat"])


def test_a_checkpoint_does_not_need_the_file(recipe, vectors, tmp_path):
    train_run(parsed(recipe), tmp_path / "run")
    train_run(parsed(recipe, "train.steps=4"), tmp_path / "whole")
    vectors.unlink()
    loaded = weft.load(tmp_path / "run", device="cpu")
    assert json.loads(json.dumps(loaded(["the cat"])))
    report = Told()
    train_run(parsed(recipe, "train.steps=4"), tmp_path / "run", resume=True, report=report)
    assert not [text for text in report.notices if "vectors" in text]
    runs = [weft.load(tmp_path / name, device="cpu").head.state_dict() for name in ("run", "whole")]
    assert all(torch.equal(runs[0][name], runs[1][name]) for name in runs[0])  # no row was put back to its start


def test_resume_with_no_checkpoint_is_a_fresh_start(recipe, tmp_path):
    report = Told()
    train_run(parsed(recipe), tmp_path / "run", resume=True, report=report)
    assert any("9 of 14 rows" in text for text in report.notices)


def test_words_of_the_file_are_known_beside_those_of_the_training_data(recipe, rows, tmp_path):
    pipeline = weft.train(recipe, ["train.lr=1e-9"], out=tmp_path / "run")
    known = [pipeline.tokenizer.token(id) for id in range(len(pipeline.tokenizer))]
    assert known[-1] == "elsewhere"
    torch.testing.assert_close(pipeline.head.body.embed.weight[-1].detach().cpu(), rows["elsewhere"])
    assert pipeline("elsewhere") != pipeline("nowhere")
    loaded = weft.load(tmp_path / "run", device="cpu")
    assert loaded.tokenizer.ids(["elsewhere"]) == [[len(known) - 1]]


@pytest.mark.parametrize(
    ("change", "last"),
    [("tokenizer.size=13", "unheard"), ("tokenizer.name=wordpiece", None), ("model.vectors=null", "unheard")],
)
def test_none_is_added_beyond_the_size_to_sub_words_or_without_a_file(recipe, change, last):
    run = parsed(recipe, change)
    tokenizer = fit_tokenizer(run.tokenizer, run.data, make_task(run))
    before = tokenizer.engine.to_str()
    learn_words(run, tokenizer)
    assert tokenizer.engine.to_str() == before
    assert last in (None, tokenizer.token(len(tokenizer) - 1))


def test_words_that_no_text_is_cut_into_are_passed_over(recipe, vectors):
    odd = ["new york", "e-mail", "Cat", "", "</s>", "été"]
    vectors.write_text("".join(f"{word}{' 0.5' * WIDTH}\n" for word in ["the", *odd]), encoding="utf-8")
    run = parsed(recipe, "tokenizer.lowercase=true")
    tokenizer = fit_tokenizer(run.tokenizer, run.data, make_task(run))
    size = len(tokenizer)
    learn_words(run, tokenizer)
    assert [tokenizer.token(id) for id in range(size, len(tokenizer))] == ["été"]
    assert tokenizer.ids(["Été </s>"])[0][0] == size
    assert tokenizer.specials.eos not in tokenizer.ids(["</s>"])[0]


# Every body that has a table


CHANNELS = [(name, kind) for name in ("cnn", "rnn", "fasttext") for kind in ("static", "nonstatic")]


@pytest.mark.parametrize(("name", "channels"), [*CHANNELS, ("cnn", "multichannel")])
def test_static_rows_stay_and_the_others_learn(recipe, rows, vectors, tmp_path, name, channels):
    width = {"width": WIDTH} if name == "fasttext" else {"width": 6, "embedding": WIDTH}
    recipe["model"] = {"name": name, **width, "vectors": str(vectors), "channels": channels}
    pipeline = weft.train(recipe, ["train.lr=0.1", "train.steps=3"], out=tmp_path / "run")
    for model in (pipeline.head.body, weft.load(tmp_path / "run", device="cpu").head.body):
        tables = {"embed": model.embed, **({"static": model.static} if channels == "multichannel" else {})}
        (id,) = pipeline.tokenizer.ids(["cat"])[0]
        stayed = {key: torch.equal(table.weight[id].cpu(), rows["cat"]) for key, table in tables.items()}
        learns = {key: table.weight.requires_grad for key, table in tables.items()}
        static = {"embed": channels == "static", **({"static": True} if channels == "multichannel" else {})}
        assert stayed == static
        assert learns == {key: not value for key, value in static.items()}


@pytest.mark.parametrize("channels", ["static", "multichannel"])
def test_a_run_with_static_rows_is_resumed_to_the_bit(recipe, vectors, tmp_path, channels):
    recipe["model"] = {"name": "cnn", "width": 6, "embedding": WIDTH, "vectors": str(vectors), "channels": channels}
    train_run(parsed(recipe), tmp_path / "run")
    train_run(parsed(recipe, "train.steps=4"), tmp_path / "run", resume=True)
    train_run(parsed(recipe, "train.steps=4"), tmp_path / "whole")
    runs = [weft.load(tmp_path / name / "last", device="cpu").head.state_dict() for name in ("run", "whole")]
    assert all(torch.equal(runs[0][name], runs[1][name]) for name in runs[0])


def test_both_channels_start_from_the_same_rows_in_one_scale(recipe, rows, vectors):
    recipe["model"] = {
        "name": "cnn",
        "width": 6,
        "embedding": WIDTH,
        "vectors": str(vectors),
        "channels": "multichannel",
    }
    run = parsed(recipe)
    run = resolve_run(run, make_task(run))
    tokenizer = fit_tokenizer(run.tokenizer, run.data, make_task(run))
    model = build(run, tokenizer)[1].body
    start_from_vectors(run, tokenizer, model)
    (id,) = tokenizer.ids(["cat"])[0]
    assert torch.equal(model.static.weight[id], rows["cat"])
    assert torch.equal(model.static.weight, model.embed.weight)


TRANSLATORS = {
    "seq2seq": {"width": 8, "embedding": WIDTH},
    "transformer": {"width": 8, "heads": 2, "layers": 1, "ffn_width": 8, "embedding": WIDTH, "tie": False},
}


@pytest.fixture
def translation(tmp_path, vectors):
    path = tmp_path / "pairs.tsv"
    path.write_text("".join(f"{text}\t{text[::-1]}\n" for text in TEXTS))
    (tmp_path / "target.6d.txt").write_text(
        f"tac {' '.join(['0.5', '-0.25'] * 3)}\ngod {' '.join(['1', '0.5'] * 3)}\nunwritten{' 1' * 6}\n"
    )

    def make(name, separate=True, **keys):
        target = {"target": {"name": "words"}} if separate else {}
        return {
            "task": {"name": "translate", "decode": {"max_length": 5}},
            "data": {"train": str(path)},
            "tokenizer": {"name": "words", **target},
            "model": {"name": name, **TRANSLATORS[name], **keys},
            "train": {"steps": 2, "batch_tokens": 64, "lr": 0.1},
        }

    return make


def tables(run, out):
    """Train; return the tokenizer and, by recipe key, the table at first and in the end."""
    trained = weft.train(run, out=out)
    first = weft.load(out / "checkpoints" / "step-00000000", device="cpu").head.body.word_embeddings()
    last = weft.load(out / "last", device="cpu").head.body.word_embeddings()
    return trained.tokenizer, {key: (first[key][0].weight, last[key][0].weight) for key in first}


@pytest.mark.parametrize("name", TRANSLATORS)
def test_a_translation_has_vectors_for_either_side(translation, vectors, rows, tmp_path, name):
    target = str(tmp_path / "target.6d.txt")
    recipe = translation(name, vectors=str(vectors), target_vectors=target, channels="static")
    tokenizer, found = tables(recipe, tmp_path / "run")
    words = {
        "vectors": (tokenizer, "cat", rows["cat"]),
        "target_vectors": (tokenizer.target, "tac", torch.tensor([0.5, -0.25] * 3)),
    }
    for key, (side, word, row) in words.items():
        first, last = found[key]
        (id,) = side.ids([word])[0]
        torch.testing.assert_close(torch.cosine_similarity(first[id], row, 0), torch.tensor(1.0))
        assert torch.equal(first, last)
        if name == "seq2seq":
            assert torch.equal(first[id], row)
    # The source knows the file's words beside its own; the target, which is written, does not.
    assert tokenizer.ids(["elsewhere"])[0] != [tokenizer.specials.unk]
    assert tokenizer.target.ids(["god"])[0] != [tokenizer.target.specials.unk]
    assert tokenizer.target.ids(["unwritten"])[0] == [tokenizer.target.specials.unk]


@pytest.mark.parametrize("name", TRANSLATORS)
def test_one_side_may_have_vectors_and_the_other_learn(translation, vectors, tmp_path, name):
    _, found = tables(translation(name, vectors=str(vectors), channels="static"), tmp_path / "run")
    assert torch.equal(*found["vectors"])
    assert not torch.equal(*found["target_vectors"])
    _, nonstatic = tables(translation(name, vectors=str(vectors)), tmp_path / "again")
    assert not torch.equal(*nonstatic["vectors"])


@pytest.mark.parametrize("name", TRANSLATORS)
def test_one_vocabulary_of_both_sides_starts_from_one_file(translation, vectors, tmp_path, name):
    tokenizer, found = tables(translation(name, separate=False, vectors=str(vectors)), tmp_path / "run")
    assert list(found) == ["vectors"]
    assert tokenizer.ids(["elsewhere"])[0] == [tokenizer.specials.unk]  # it would be written, and never be trained
    with pytest.raises(
        weft.ConfigError, match=r"model.target_vectors: .* share one.* leave it out, or .* tokenizer.target"
    ):
        weft.train(translation(name, separate=False, target_vectors=str(vectors)), out=tmp_path / "shared")


def test_a_transformer_keeps_the_scale_of_its_embeddings(translation, vectors, rows, tmp_path):
    tokenizer, found = tables(translation("transformer", vectors=str(vectors)), tmp_path / "run")
    table = found["vectors"][0]
    (id,) = tokenizer.ids(["cat"])[0]
    ratio = table[id] / rows["cat"]
    torch.testing.assert_close(ratio, ratio[:1].expand(WIDTH))  # one factor for all
    known = torch.stack([table[tokenizer.ids([word])[0][0]] for word in WORDS])
    assert known.std(correction=0).item() == pytest.approx(8**-0.5, rel=0.3)


@pytest.mark.parametrize("name", TRANSLATORS)
def test_another_width_of_a_translation_is_refused_with_the_remedy(translation, vectors, tmp_path, name):
    for change in ({"embedding": 5}, {"embedding": None, "tie": False}):
        recipe = translation(name, target_vectors=str(vectors), **change)
        with pytest.raises(
            weft.ConfigError, match=r"model.target_vectors: .* have 6 numbers, and model.embedding is \d"
        ):
            weft.train(recipe, out=tmp_path / f"run-{change['embedding']}")
