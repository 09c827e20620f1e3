"""Character inputs from row to answer: unknown words keep their characters, and inference is as training."""

import numpy as np
import pytest
import torch
from tests.labelling import made

import weft
from weft.config.recipes import read_recipe
from weft.config.run import Run
from weft.data.batching.packed_items import pack
from weft.data.truncation import TruncationPolicy
from weft.models.base import Role
from weft.models.rnn import RNN, RNNConfig
from weft.tasks.classification.task import ClassifyExample
from weft.tasks.factory import make_task
from weft.tasks.tagging import TagExample
from weft.tokens import CHAR_PAD, WORD_BEGIN, WORD_END

LIMIT = TruncationPolicy(1024, "error")
# A name ends in "-ov", whatever it is; a verb in "-ing". Each stands there once, so that none is in the vocabulary.
ENDINGS = {"ov": "NAME", "ing": "VERB"}
STEMS = ["Ban", "tur", "Mel", "dak", "Pis", "gor", "Lam", "ker", "Sod", "fil", "Rop", "vun"]
TOKENIZERS = ["words", "characters", "bytes", "bpe", "wordpiece", "unigram"]


@pytest.fixture
def rows(tmp_path):
    path = tmp_path / "rows.conll"
    words = [(stem + end, tag) for stem in STEMS for end, tag in ENDINGS.items()]
    path.write_text("\n\n".join(f"the O\n{word} {tag}\n. O" for word, tag in words) + "\n", encoding="utf-8")
    return path


@pytest.fixture
def recipe(rows):
    return {
        "task": {"name": "tag"},
        "data": {"train": str(rows), "valid": str(rows)},
        "tokenizer": {"name": "words", "min_count": 2, "lowercase": True},
        "model": {"name": "rnn", "direction": "both", "width": 16, "embedding": 8, "chars": 12},
        "train": {"steps": 60, "batch_tokens": 64, "lr": 0.02},
    }


@pytest.fixture
def sorts(tmp_path, recipe):
    """Return a recipe that sorts texts by what their words end in."""
    path = tmp_path / "rows.tsv"
    path.write_text("".join(f"the {stem}{end}\t{tag}\n" for stem in STEMS for end, tag in ENDINGS.items()))
    return {**recipe, "task": {"name": "classify"}, "data": {"train": str(path), "valid": str(path)}}


def encoded(task, *examples, limit=LIMIT):
    return [item for items in task.encode_batch(examples, task.tokenizer, limit) for item in items]


def read(chars):
    """Return the words that rows of characters spell."""
    assert all(row[0] == WORD_BEGIN and WORD_END in row for row in chars.tolist())
    return [bytes(sign for sign in row if sign < WORD_BEGIN).decode("utf-8", "replace") for row in chars.tolist()]


def collated(task, *examples, limit=LIMIT):
    return task.collate(encoded(task, *examples, limit=limit), np.random.default_rng(0))


# Items and batches


def test_a_word_is_spelt_as_it_was_given(recipe):
    task, _ = made(recipe)
    ids, begins, spelling, tags = encoded(task, TagExample(words=["the", "Ünseen"], tags=["O", "NAME"]))[0]
    assert ids.tolist()[2] == task.tokenizer.specials.unk
    assert (begins.tolist(), tags.tolist()) == ([1, 2], [1, 0])
    assert bytes(sign for sign in spelling.tolist() if sign < WORD_BEGIN) == "theÜnseen".encode()
    batch = collated(task, TagExample(words=["the", "Ünseen"]), TagExample(words=["The"]))
    assert read(batch.tokens.chars) == ["", "the", "Ünseen", "", "", "The", ""]
    assert batch.targets is None


def test_only_a_model_that_asks_gets_it(recipe):
    task, _ = made(recipe, "model.chars=0")
    assert not task.uses_chars
    assert len(encoded(task, TagExample(words=["the"]))[0]) == 2
    assert collated(task, TagExample(words=["the"])).tokens.chars is None


def test_a_spelling_is_no_token_of_the_budget(recipe):
    task, _ = made(recipe)
    items = encoded(task, TagExample(words=["the", "Banov"], tags=["O", "NAME"]), TagExample(words=["the"]))
    assert [len(item) for item in items] == [4, 3]
    assert pack(items, num_token_arrays=task.num_token_arrays).sizes.tolist() == [4, 3]


@pytest.mark.parametrize("name", TOKENIZERS)
def test_every_piece_of_a_word_is_spelt_as_the_word(recipe, name):
    size = {"bpe": 300, "wordpiece": 60, "unigram": 60}.get(name)
    task, _ = made({**recipe, "tokenizer": {"name": name, **({"size": size} if size else {})}})
    words = ["Banov", "", "naïve-ish", "x y", "日本"]
    batch = collated(task, TagExample(words=words))
    spelt = read(batch.tokens.chars)
    edges = [*batch.positions.ids.tolist(), len(spelt) - 1]
    assert [spelt[0], spelt[-1]] == ["", ""]
    for word, first, last in zip(words, edges[:-1], edges[1:], strict=True):
        assert spelt[first:last] == [word] * (last - first)


@pytest.mark.parametrize("policy", ["window", "cut"])
def test_each_window_has_its_own_words(recipe, policy):
    task, _ = made(recipe)
    words = ["one", "two-fold", "three"]
    items = encoded(task, TagExample(words=words), limit=TruncationPolicy(3, policy))
    spelt = [read(task.collate([item], np.random.default_rng(0)).tokens.chars) for item in items]
    assert spelt == [["", "one", ""], ["", "two-fold", "two-fold", "two-fold", ""], ["", "three", ""]][: len(items)]
    assert len(items) == {"window": 3, "cut": 1}[policy]


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_text_is_spelt_token_by_token(sorts, name):
    size = {"bpe": 300, "wordpiece": 60, "unigram": 60}.get(name)
    task, _ = made({**sorts, "tokenizer": {"name": name, **({"size": size} if size else {})}})
    text, pair = "The Banov  sings, naïvely", "日本 Melov"
    (item,) = encoded(task, ClassifyExample(text=text, pair=pair))
    special = task.tokenizer.specials
    first, second = task.tokenizer.ids([text, pair])
    assert item[0].tolist() == [special.bos, *first, special.eos, *second, special.eos]
    spelt = read(collated(task, ClassifyExample(text=text, pair=pair)).tokens.chars)
    assert len(spelt) == len(item[0])
    both = (text + pair).replace(" ", "")
    if name in ("bytes", "bpe"):  # a piece of a character is spelt as the whole of it
        assert set("".join(spelt)) == set(both)
    else:
        assert "".join(spelt) == both


def test_a_text_that_is_cut_keeps_the_spelling_of_what_is_left(sorts):
    task, _ = made(sorts, "data.truncation=cut")
    example = ClassifyExample(text="one two three four", pair="five six")
    spelt = read(collated(task, example, limit=TruncationPolicy(4, "cut")).tokens.chars)
    assert spelt == ["", "one", "two", "", "five", "six", ""]


# A model that spells only encodes


def test_it_neither_scores_nor_fills_nor_generates():
    for direction in ("forward", "both", "backward"):
        config = RNNConfig(name="rnn", width=8, direction=direction, chars=4)
        assert RNN.roles(config) == {Role.ENCODER}
        assert RNN(config, 9).output is None
        assert RNN.uses_chars(config)
    assert not RNN.uses_chars(RNNConfig(name="rnn"))


@pytest.mark.parametrize("chars", [-1, 1.5, "many"])
def test_a_count_that_is_none_is_refused(recipe, chars):
    with pytest.raises(weft.ConfigError, match="model.chars"):
        made(recipe, f"model.chars={chars}")


# From training to the answer


@pytest.fixture
def trained(recipe, tmp_path):
    return weft.train(recipe, out=tmp_path / "run")


def test_what_is_asked_is_read_as_what_was_trained(trained, rows, tmp_path):
    assert trained.evaluate()["accuracy"] == 1.0
    questions = [{"words": ["the", stem + end, "."]} for stem in STEMS for end in ENDINGS]
    answers = trained(questions)
    assert [answer["tags"][1] for answer in answers] == list(ENDINGS.values()) * len(STEMS)
    assert trained(questions[3])[0] == answers[3]  # alone as among others
    assert trained("the Pising.")[0]["tags"] == ["O", "VERB", "O"]
    assert weft.load(tmp_path / "run", device="cpu")(questions) == answers


def test_unknown_words_are_told_apart_by_their_letters(trained):
    name, verb = trained([{"words": ["the", "Zubov", "."]}, {"words": ["the", "Zubing", "."]}])
    assert (name["tags"], verb["tags"]) == (["O", "NAME", "O"], ["O", "VERB", "O"])


def test_without_spelling_they_are_not(recipe, tmp_path):
    plain = weft.train(recipe, ["model.chars=0"], out=tmp_path / "plain")
    name, verb = plain([{"words": ["the", "Zubov", "."]}, {"words": ["the", "Zubing", "."]}])
    assert (name["tags"], name["scores"]) == (verb["tags"], verb["scores"])


def test_texts_are_sorted_by_their_letters(sorts, tmp_path):
    pipeline = weft.train(sorts, out=tmp_path / "sorts")
    assert [answer["label"] for answer in pipeline(["the Zubov", "the Zubing"])] == ["NAME", "VERB"]


def test_the_answer_is_read_again_with_its_spelling(trained):
    words, tags, batch = trained.teacher_forced("the Banov.")
    assert (words, tags) == (["<s>", "the", "<unk>", ".", "</s>"], ["O", "NAME", "O"])
    assert read(batch.tokens.chars) == ["", "the", "Banov", ".", ""]
    assert (batch.tokens.chars[1] == CHAR_PAD).any()
    (reach,) = trained.gradients("the Banov.")
    assert len(reach.norms) == 5


# Known words read as unknown


@pytest.mark.parametrize("kind", ["tag", "classify"])
def test_in_training_a_share_of_the_tokens_is_unknown_and_keeps_its_spelling(recipe, sorts, kind):
    task, head = made(recipe if kind == "tag" else sorts, "task.unknown=0.25", "tokenizer.min_count=1")
    asked = {"words": ["the", "Banov"] * 300} if kind == "tag" else {"text": "the Banov " * 300}
    tokens = collated(task, task.Example(**asked)).tokens
    assert head.eval().seen(tokens) is tokens
    torch.manual_seed(0)
    seen = head.train().seen(tokens)
    unknown = seen.ids == task.tokenizer.specials.unk
    assert 0.2 < unknown.float().mean() < 0.3
    assert torch.equal(seen.ids[~unknown], tokens.ids[~unknown])
    assert torch.equal(seen.chars, tokens.chars)
    assert not (tokens.ids == task.tokenizer.specials.unk).any()  # what was given is as it was


@pytest.mark.parametrize("kind", ["tag", "classify"])
def test_the_body_reads_them_so_in_training_alone(recipe, sorts, kind):
    rows = recipe if kind == "tag" else sorts
    task, head = made(rows, "task.unknown=0.999", "task.dropout=0", "model.chars=0", "tokenizer.min_count=1")
    words = [f"{stem}ov" for stem in STEMS]
    texts = [{"words": [word], "tags": ["O"]} if kind == "tag" else {"text": word, "label": "NAME"} for word in words]
    batches = [collated(task, task.Example(**text)) for text in texts]
    torch.manual_seed(0)
    with torch.no_grad():
        training, asking = ({head.train(mode)(one)[0].popitem()[1].item() for one in batches} for mode in (True, False))
    assert (len(training), len(asking)) == (1, len(words))


@pytest.mark.parametrize("name", ["bytes", "bpe"])
def test_where_nothing_is_unknown_the_key_is_refused(recipe, name):
    recipe["tokenizer"] = {"name": name}
    with pytest.raises(weft.ConfigError, match=f"task.unknown: to the tokenizer '{name}' nothing is unknown"):
        make_task(Run.parse(read_recipe(recipe, ["task.unknown=0.1"])))
    made(recipe, "tokenizer.name=words", "task.unknown=0.1")
