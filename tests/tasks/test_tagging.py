"""Sequence tagging: items, windows, losses and answers of words split into sub-words; entity metrics for BIO tags."""

import json
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.labelling import made
from torch.nn import functional as F

import weft
from weft.config.recipes import read_recipe
from weft.config.run import Run
from weft.data.batching.packed_items import pack
from weft.data.truncation import TruncationPolicy
from weft.errors import ConfigError, DataError
from weft.tasks.factory import make_task
from weft.tasks.tagging import Tag, TagConfig, TagExample, _split_windows
from weft.tokenization.trainable import BPE

transformers = pytest.importorskip("transformers")
LIMIT = TruncationPolicy(1024, "error")
ROWS = [
    ("on Monday morning", "O B-DAY B-TIME"),
    ("May 12", "B-DATE I-DATE"),
    ("see you in May", "O O O B-DATE"),
    ("until late Monday", "O B-TIME B-DAY"),
]


@pytest.fixture
def rows(tmp_path):
    path = tmp_path / "rows.conll"
    sentences = ["\n".join(map(" ".join, zip(words.split(), tags.split(), strict=True))) for words, tags in ROWS]
    path.write_text("\n\n".join(sentences) + "\n", encoding="utf-8")
    return path


@pytest.fixture
def recipe(rows):
    return {
        "task": {"name": "tag"},
        "data": {"train": str(rows), "valid": str(rows)},
        "tokenizer": {"name": "characters"},
        "model": {"name": "cnn", "width": 24, "embedding": 8},
        "train": {"steps": 80, "batch_tokens": 64, "lr": 0.02},
    }


def ask(words, tags=None):
    return TagExample(words=words.split(), tags=None if tags is None else tags.split())


def encoded(task, *examples, limit=LIMIT):
    return [item for items in task.encode_batch(examples, task.tokenizer, limit) for item in items]


def collated(task, *examples, limit=LIMIT):
    return task.collate(encoded(task, *examples, limit=limit), np.random.default_rng(0))


# Words to items.


def test_an_item_has_the_sub_words_where_each_word_begins_and_the_tags(recipe):
    task, _ = made(recipe)
    special, (may, twelve) = task.tokenizer.specials, task.tokenizer.ids(["May", "12"])
    ((ids, begins, tags),) = encoded(task, ask("May 12", "B-DATE O"))
    assert ids.tolist() == [special.bos, *may, *twelve, special.eos]
    assert begins.tolist() == [1, 4]
    assert [task.labels.names[tag] for tag in tags] == ["B-DATE", "O"]
    assert len(encoded(task, ask("May 12"))[0]) == 2
    assert pack(encoded(task, ask("May 12", "O O")), num_token_arrays=task.num_token_arrays).sizes.tolist() == [7]


@pytest.mark.parametrize("name", ["words", "characters", "bytes", "bpe", "wordpiece", "unigram"])
def test_every_word_keeps_its_place_through_every_tokenizer(recipe, name):
    size = {"bpe": 300, "wordpiece": 60, "unigram": 60}.get(name)
    task, _ = made({**recipe, "tokenizer": {"name": name, **({"size": size} if size else {})}})
    words = ["Monday", "", "\u200b", "naïve-ish", "12.5%", "x y", "Monday", "日本"]
    ((ids, begins),) = encoded(task, TagExample(words=words))
    assert len(begins) == len(words)
    ends = [*begins[1:].tolist(), len(ids) - 1]
    special = task.tokenizer.specials
    nothing = [special.eos if special.unk is None else special.unk]
    for word, first, last in zip(words, begins, ends, strict=True):
        spaced = f" {word}" if name == "bpe" and word else word
        assert ids[first:last].tolist() == (task.tokenizer.ids([spaced])[0] or nothing)


def test_the_tokenizer_learns_words_as_they_are_encoded(recipe):
    task, _ = made({**recipe, "tokenizer": {"name": "bpe", "size": 300}})
    assert task.texts(ask("on Monday")) == ([" on", " Monday"], [])
    ((ids, begins),) = encoded(task, ask("Monday"))
    assert (task.tokenizer.token(int(ids[1])), begins.tolist()) == (" Monday", [1])
    assert made(recipe)[0].texts(ask("on Monday")) == (["on", "Monday"], [])


@pytest.mark.parametrize("name", ["bpe", "unigram", "wordpiece"])
def test_words_are_cut_as_they_stand_in_a_text(recipe, name):
    """A model that was trained on text knows them so, and not as they are alone."""
    task, _ = made({**recipe, "tokenizer": {"name": name, "size": 320 if name == "bpe" else 60}})
    words = ["Monday", "morning", ",", "12", "on", "x"]
    ((ids, _),) = encoded(task, TagExample(words=words))
    text = task.tokenizer.ids([" " * (name == "bpe") + " ".join(words)])[0]
    assert ids[1:-1].tolist() == text
    if name == "bpe":  # the control: words without their spaces are other tokens
        assert [id for alone in task.tokenizer.ids(words) for id in alone] != text


@pytest.fixture(scope="module")
def spaced():
    """A tokenizer of the kind of GPT-2's and RoBERTa's, and transformers' way to read words with it."""
    texts = ["the dog sees the cat on Monday morning, and it's 12.5 % of naïve dogs in 東京"] * 3
    ours = BPE.train(texts, BPE.Config(name="bpe", size=330))
    model = json.loads(ours.engine.to_str())["model"]
    merges = [tuple(pair) for pair in model["merges"]]
    return ours, transformers.RobertaTokenizer(vocab=model["vocab"], merges=merges, add_prefix_space=True)


word = st.text(st.characters(exclude_categories=("Cs",)), max_size=8) | st.sampled_from(["the", "dogs", "it's", " x"])


@given(st.lists(word, min_size=1, max_size=6))
@example(["the", "", " ", " dog", "dog ", "\n", "東京", "</s>"])
@settings(max_examples=100)
def test_words_of_byte_level_bpe_are_those_of_transformers(spaced, words):
    ours, theirs = spaced
    task = tagger("A B")
    ((ids, begins),) = task.encode(TagExample(words=words), ours, LIMIT)
    cut = theirs(words, is_split_into_words=True, add_special_tokens=False, split_special_tokens=True)
    if any(word not in cut.word_ids() for word in range(len(words))):  # nothing is left of a word: ours has a token
        words = [word for number, word in enumerate(words) if number in cut.word_ids()]
        ((ids, begins),) = task.encode(TagExample(words=words), ours, LIMIT)
    assert ids[1:-1].tolist() == cut.input_ids
    word_numbers = [cut.word_ids()[place - 1] for place in begins]
    assert word_numbers == list(dict.fromkeys(cut.word_ids()))
    assert [cut.word_ids().index(number) + 1 for number in word_numbers] == begins.tolist()


def test_many_are_encoded_as_one_by_one(recipe):
    task, _ = made(recipe)
    examples = [ask(*row) for row in ROWS] + [ask(""), ask("Monday"), TagExample(text="on Monday, 12")]
    alone = [task.encode(example, task.tokenizer, LIMIT) for example in examples]
    together = task.encode_batch(examples, task.tokenizer, LIMIT)
    plain = [[[list(map(list, item)) for item in items] for items in side] for side in (alone, together)]
    assert plain[0] == plain[1]


def test_a_batch_reads_the_first_sub_word_of_each_word(recipe):
    task, _ = made(recipe)
    batch = collated(task, ask("May 12", "B-DATE I-DATE"), ask("on", "O"))
    firsts = batch.tokens.ids[batch.positions.ids].tolist()
    assert firsts == [task.tokenizer.ids([word])[0][0] for word in ("May", "12", "on")]
    assert batch.positions.lengths.tolist() == [2, 1]
    assert [task.labels.names[tag] for tag in batch.targets] == ["B-DATE", "I-DATE", "O"]
    assert (batch.counts, batch.size) == ({"words": 3}, 11)
    assert collated(task, ask("May 12", "O O"), ask("on")).targets is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Thursday, January 12", ["Thursday", ",", "January", "12"]),
        ("  7:30\tp.m.\n", ["7", ":", "30", "p", ".", "m", "."]),
        ("हिन्दी a_b", ["हिन्दी", "a_b"]),
        ("", []),
    ],
)
def test_a_text_is_cut_at_spaces_and_around_signs(text, words):
    assert TagExample(text=text).get_words() == words


def test_a_lone_surrogate_is_no_text(recipe):
    with pytest.raises(DataError, match="lone surrogate"):
        made(recipe)[0].encode(TagExample(text="a \ud800"), None, LIMIT)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({}, "must have words or text, one of them"),
        ({"words": ["a"], "text": "a"}, "must have words or text, one of them"),
        ({"words": ["a", "b"], "tags": ["O"]}, "must have a tag a word, and has 1 for 2"),
        ({"text": "a, b", "tags": ["O"]}, "must have a tag a word, and has 1 for 3"),
        ({"words": 3}, "valid list"),
        ({"words": "a b", "tags": "O"}, "must have a tag a word, and has 1 for 2"),
        ({"words": ["a"], "label": "O"}, "Extra inputs"),
    ],
)
def test_what_is_no_example_is_refused(raw, message):
    with pytest.raises(ValueError, match=message):
        TagExample.model_validate(raw)


def test_a_line_of_words_and_a_line_of_tags_are_a_sentence():
    lines = TagExample.model_validate({"words": "play  jazz ", "tags": "O B-genre"})
    assert lines == TagExample(words=["play", "jazz"], tags=["O", "B-genre"])


def test_a_sentence_with_the_wrong_number_of_tags_names_its_place(recipe, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"words": ["a"], "tags": ["O"]}\n{"words": ["a", "b"], "tags": [3]}\n')
    with pytest.raises(DataError, match=r"rows.jsonl:2: must have a tag a word, and has 1 for 2"):
        made(recipe, f"data.train={path}")


# Too long.


@given(st.lists(st.integers(1, 6), max_size=12), st.integers(1, 9))
def test_windows_are_whole_words_in_order_that_fit(sizes, longest):
    pieces = [[0] * size for size in sizes]
    windows = _split_windows(pieces, TruncationPolicy(longest, "window"))
    assert [subwords for window in windows for subwords in pieces[window]] == pieces
    for window in windows:
        inside = [min(len(subwords), longest) for subwords in pieces[window]]
        assert sum(inside) <= longest
        assert inside or not sizes
    for left, right in pairwise(windows):  # nor could the next word have come along
        assert sum(min(len(subwords), longest) for subwords in pieces[left.start : right.start + 1]) > longest


@pytest.mark.parametrize(
    ("policy", "lengths", "message"),
    [
        ("window", [2, 1], "windowed 1 sequence longer than data.max_length=8"),
        ("cut", [2], "cut 1 sequence longer than data.max_length=8"),
        ("drop", [], "dropped 1 sequence longer than data.max_length=8"),
    ],
)
def test_a_long_sentence_is_windowed_cut_or_dropped_and_counted(recipe, policy, lengths, message):
    task, limit = made(recipe)[0], TruncationPolicy(8, policy)
    items = encoded(task, ask("on Monday morning", "O B-DAY B-TIME"), limit=limit)
    assert [len(tags) for _, _, tags in items] == lengths
    assert [len(ids) - 2 for ids, *_ in items] == [8, 7][: len(lengths)]
    assert str(limit) == message
    with pytest.raises(DataError, match="got 15 tokens, data.max_length is 8"):
        encoded(task, ask("on Monday morning"), limit=TruncationPolicy(8, "error"))


def test_a_word_longer_than_a_window_keeps_its_place(recipe):
    task, limit = made(recipe)[0], TruncationPolicy(3, "window")
    items = encoded(task, ask("in Monday on"), limit=limit)
    assert [len(begins) for _, begins in items] == [1, 1, 1]
    assert [len(ids) - 2 for ids, _ in items] == [2, 3, 2]


def test_the_answers_of_windows_are_joined_again(recipe, tmp_path):
    whole = weft.train(recipe, out=tmp_path / "whole")
    cut = weft.train(recipe, ["data.max_length=9", "data.truncation=window"], tmp_path / "cut")
    assert whole.evaluate()["accuracy"] == 1
    assert cut.evaluate()["accuracy"] > 0.7
    task, head = cut.task, cut.head
    outputs = head.predict(collated(task, ask("see you in May"), limit=TruncationPolicy(9, "window")), task.options())
    answer = task.answer(ask("see you in May"), outputs)
    assert len(outputs) == 2
    assert answer == cut("see you in May")[0]
    with pytest.raises(DataError, match=r"example 1: got 11 tokens, data.max_length is 9"):
        weft.train(recipe, ["data.max_length=9", "data.truncation=drop", "train.steps=1"], tmp_path / "drop")(
            "see you in May"
        )
    assert answer["words"] == ["see", "you", "in", "May"]
    assert len(answer["tags"]) == len(answer["scores"]) == 4
    assert whole('{"words": ["see", "you"]}') == whole({"words": ["see", "you"]}) != whole('{"words": ["see", 2]')


def test_words_that_were_cut_off_are_wrong():
    task = tagger("O B-DAY I-DAY")
    answer = task.answer(ask("a b c", "O B-DAY I-DAY"), [([2, 0], [0.9, 0.8])])
    assert answer == {"words": ["a", "b", "c"], "tags": ["I-DAY", "O", ""], "scores": [0.9, 0.8, 0.0]}
    assert task.score([answer], [ask("a b c", "I-DAY O O")])["accuracy"] == pytest.approx(2 / 3)
    assert task.confusion([answer], [ask("a b c", "I-DAY O O")]).counts == [[1, 0, 0], [0, 0, 0], [0, 0, 1]]


def test_a_sentence_with_no_words_teaches_nothing_and_has_no_tags(recipe, tmp_path):
    task, _ = made(recipe)
    assert encoded(task, TagExample(words=[], tags=[])) == []
    for crf in ("false", "true"):
        pipeline = weft.train(recipe, ["train.steps=1", f"task.crf={crf}"], tmp_path / crf)
        empty = {"words": [], "tags": [], "scores": []}
        assert pipeline("")[0] == pipeline({"words": []})[0] == empty
        assert pipeline(["", "on Monday", " "])[::2] == [empty, empty]


# The loss.


@torch.no_grad()
def test_the_loss_is_the_cross_entropy_at_first_sub_words(recipe):
    task, head = made(recipe)
    batch = collated(task, *(ask(*row) for row in ROWS))
    sums, carry = head.eval()(batch)
    logits = head.output(head.body.encode(batch.tokens)[0][batch.positions.ids])
    assert carry is None
    torch.testing.assert_close(sums["words"], F.cross_entropy(logits, batch.targets, reduction="sum"))


def test_weights_multiply_the_gradient_of_their_tags_in_training_alone(recipe):
    task, head = made(recipe, "task.dropout=0", "task.weights=balanced")
    counts = {"O": 5, "B-DAY": 2, "B-TIME": 2, "B-DATE": 2, "I-DATE": 1}
    assert task.config.weights == pytest.approx({tag: 12 / (5 * count) for tag, count in counts.items()})
    batch = collated(task, *(ask(*row) for row in ROWS))
    parameters = list(head.parameters())
    ours = torch.autograd.grad(head.train()(batch)[0]["words"], parameters)
    logits = head.output(head.body.encode(batch.tokens)[0][batch.positions.ids])
    terms = F.cross_entropy(logits, batch.targets, reduction="none")
    weights = torch.tensor([task.config.weights[task.labels.names[tag]] for tag in batch.targets])
    expected = torch.autograd.grad((terms * weights).sum(), parameters)
    for mine, yours in zip(ours, expected, strict=True):
        torch.testing.assert_close(mine, yours)
    with torch.no_grad():
        torch.testing.assert_close(head.eval()(batch)[0]["words"], terms.sum())


@torch.no_grad()
@pytest.mark.parametrize("crf", ["false", "true"])
def test_a_sentence_alone_answers_as_in_any_batch(recipe, crf):
    task, head = made(recipe, f"task.crf={crf}")
    head.double().eval()
    if head.crf:
        for parameter in head.crf.parameters():
            parameter.normal_()
    examples = [ask(words) for words, _ in ROWS] + [ask("")]
    together = head.predict(collated(task, *examples), task.options())
    for sentence, (tags, probabilities) in zip(examples, together, strict=True):
        ((alone, alone_probabilities),) = head.predict(collated(task, sentence), task.options())
        assert alone == tags
        assert alone_probabilities == pytest.approx(probabilities, rel=1e-5)


@torch.no_grad()
def test_a_crf_sums_over_whole_sentences(recipe):
    task, head = made(recipe, "task.crf=true")
    head.crf.transitions.normal_()
    batch = collated(task, *(ask(*row) for row in ROWS))
    scores = head.eval().output(head.body.encode(batch.tokens)[0][batch.positions.ids])
    expected = head.crf.loss_sum(scores, batch.targets, torch.tensor([3, 2, 4, 3]))
    torch.testing.assert_close(head(batch)[0]["words"], expected)
    tags, probabilities = head.crf.decode(scores, torch.tensor([3, 2, 4, 3]))
    outputs = head.predict(batch, task.options())
    assert [tag for values, _ in outputs for tag in values] == tags.tolist()
    assert [p for _, values in outputs for p in values] == pytest.approx(probabilities.tolist())


# Labels and metrics.


def tagger(labels, **config):
    return Tag(TagConfig(name="tag", labels=labels.split(), **config))


@pytest.mark.parametrize(
    ("labels", "scheme", "metric"),
    [
        ("B-DAY I-DAY O", "auto", "f1"),
        ("I-A O", "auto", "f1"),
        ("B E I O S", "auto", "f1"),
        ("B-A E-A I-A O S-A", "auto", "f1"),
        ("ADJ NOUN", "auto", "accuracy"),
        ("B-DAY NOUN O", "auto", "accuracy"),
        ("BAD IN", "auto", "accuracy"),
        ("O", "auto", "accuracy"),
        ("B-DAY I-DAY O", "plain", "accuracy"),
        ("T-POS O", "bio", "f1"),
    ],
)
def test_the_metric_goes_by_the_scheme(labels, scheme, metric):
    task = tagger(labels, scheme=scheme)
    assert task.metric == task.metrics[0] == metric
    assert set(task.score([{"tags": ["O"]}], [ask("a", "O")])) == set(task.metrics)


def test_tags_that_mark_no_entities_have_no_such_scheme(recipe):
    for labels in ("[NOUN, VERB]", "[B-DAY, O, NOUN]"):
        with pytest.raises(ConfigError, match="task.scheme: bio is for tags such as B-DAY.*; 'NOUN' is none; set"):
            made(recipe, "task.scheme=bio", f"task.labels={labels}")
    made(recipe, "task.scheme=bio")
    recipe["data"]["train"] = recipe["data"]["train"].replace("rows", "plain")
    with open(recipe["data"]["train"], "w", encoding="utf-8") as file:
        file.write("a DET\ndog NOUN\n")
    with pytest.raises(ConfigError, match="'DET' is none; set task.scheme: plain, or leave it out"):
        made(recipe, "task.scheme=bio")


def test_an_example_of_no_kind_is_told_in_one_clean_line(recipe, tmp_path):
    pipeline = weft.train(recipe, ["train.steps=1"], tmp_path / "run")
    with pytest.raises(
        DataError, match=r"^example 1: example: must have words or text, one of them, but is \{\} instead"
    ):
        pipeline({})


def test_an_empty_tag_names_its_row(recipe, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"words": ["a"], "tags": ["X"]}\n{"words": ["a"], "tags": [""]}\n')
    with pytest.raises(DataError, match=r"rows.jsonl:2: tags.0: must have a name, and not be blank, but is ''"):
        made(recipe, f"data.train={path}")


def test_an_unknown_metric_is_refused_as_soon_as_the_labels_are_known(recipe, tmp_path):
    made(recipe, "train.metric=f1")
    path = tmp_path / "plain.conll"
    path.write_text("a DET\nb NOUN\n")
    with pytest.raises(ConfigError, match="train.metric: the task has no metric 'f1'; known: accuracy, loss"):
        made(recipe, "train.metric=f1", f"data.train={path}", f"data.valid={path}")
    with pytest.raises(ConfigError, match="train.metric: the task has no metric 'f2'"):
        make_task(Run.parse(read_recipe(recipe, ["train.metric=f2"])))


def test_a_tag_that_is_not_known_names_its_place(recipe, tmp_path):
    path = tmp_path / "valid.conll"
    path.write_text("on O\n\nMay B-DATE\n12 I-DTE\n")
    with pytest.raises(
        DataError, match=r"valid.conll:3: the label 'I-DTE' is not in task.labels.*did you mean 'I-DATE'"
    ):
        weft.train(recipe, [f"data.valid={path}"], tmp_path / "run")


@pytest.mark.parametrize("change", ["task.weights=balanced", "task.label_smoothing=0.1"])
def test_a_crf_takes_no_weights_of_single_tags(recipe, change):
    key = change.split("=")[0]
    with pytest.raises(ConfigError, match=f"{key} is of single tags, and task.crf scores whole sequences"):
        made(recipe, "task.crf=true", change)


def test_scores_go_by_entity_and_by_word():
    task = tagger("B-DAY I-DAY O")
    answers = [{"tags": ["B-DAY", "I-DAY", "O"]}, {"tags": ["O", "B-DAY"]}]
    examples = [ask("a b c", "B-DAY O O"), ask("a b", "O B-DAY")]
    assert task.score(answers, examples) == pytest.approx(
        {"f1": 0.5, "precision": 0.5, "recall": 0.5, "accuracy": 4 / 5}
    )
    assert task.confusion(answers, examples).counts == [[2, 0, 0], [0, 0, 0], [0, 1, 2]]


def test_a_report_is_of_entities_or_of_tags():
    answers, examples = [{"tags": ["B-DAY", "I-DAY", "O"]}], [ask("a b c", "B-DAY O B-YEAR")]
    report = tagger("B-DAY I-DAY O B-YEAR").report(answers, examples)
    assert (report.unit, list(report.classes)) == ("entity", ["DAY", "YEAR"])
    assert (report.classes["DAY"].f1, report.averages["micro"].support) == (0, 2)
    report = tagger("B-DAY I-DAY O B-YEAR E-DAY", scheme="plain").report(answers, examples)
    assert (report.unit, list(report.classes)) == ("tag", ["B-DAY", "I-DAY", "O", "B-YEAR"])
    assert report.classes["B-DAY"].f1 == 1


def test_a_word_that_was_not_read_counts_in_the_report_as_missed():
    task = tagger("A B")
    report = task.report([{"tags": ["A", ""]}], [ask("a b", "A B")])
    assert (report.classes["B"].recall, report.classes["B"].support) == (0, 1)
    assert list(report.classes) == ["A", "B"]


def test_a_sentence_with_a_wrong_tag_is_an_error_with_its_words():
    task = tagger("A B")
    answers = [{"words": ["x", "y"], "tags": ["A", "B"], "scores": [0.9, 0.6]}] * 3
    errors = task.errors(answers, [ask("x y", tags) for tags in ("A B", "A A", "B A")])
    assert errors[0] is None
    assert (errors[1].gold, errors[1].predicted, errors[1].score) == (["A", "A"], ["A", "B"], 0.6)
    assert errors[2].score == 0.9
    assert errors[2].details == {"words": ["x", "y"]}


# Answers.


def test_an_answer_has_the_words_as_given():
    task = tagger("A B")
    answer = task.answer(TagExample(words=["x y", "Z"]), [([1, 0], [0.75, 0.5])])
    assert answer == {"words": ["x y", "Z"], "tags": ["B", "A"], "scores": [0.75, 0.5]}
    assert task.format_answer(answer) == "x y/B Z/A"
    assert task.format_answer({"words": ["a\n"], "tags": ["A"]}) == "a /A"
    assert task.preview(ask("a b", "A B")) == ("a b", "a/A b/B")


@pytest.mark.parametrize("crf", ["false", "true"])
def test_it_learns_and_tags_plain_text(recipe, tmp_path, crf):
    pipeline = weft.train(recipe, [f"task.crf={crf}"], tmp_path / "run")
    assert pipeline.evaluate()["f1"] == 1
    (answer,) = pipeline("on Monday morning")
    assert answer["tags"] == ["O", "B-DAY", "B-TIME"]
    assert all(0.5 < score <= 1 for score in answer["scores"])
    again = weft.load(tmp_path / "run")
    assert again.run.task.labels == ("B-DATE", "B-DAY", "B-TIME", "I-DATE", "O")
    assert again({"words": ["May", "12"]})[0]["tags"] == ["B-DATE", "I-DATE"]
    names, tags, batch = again.task.teacher_forced(
        again.task.encode(again.example("May"), again.tokenizer, LIMIT), [([0], [0.9])]
    )
    assert (names, tags, batch.targets.tolist()) == (["<s>", "M", "a", "y", "</s>"], ["B-DATE"], [0])


@pytest.mark.parametrize(
    ("model", "tokenizer"),
    [("bert", {"name": "wordpiece", "size": 60}), ("bert", {"name": "bpe"}), ("gpt", {"name": "bpe", "size": 300})],
)
def test_a_transformer_learns_tags_at_first_sub_words(recipe, tmp_path, model, tokenizer):
    sizes = {"width": 32, "heads": 2, "layers": 2, "max_positions": 64, "dropout": 0}
    recipe = {**recipe, "model": {"name": model, **sizes}, "tokenizer": tokenizer}
    pipeline = weft.train(recipe, ["train.lr=5e-3"], tmp_path / "run")
    assert pipeline.evaluate()["f1"] == 1
    assert pipeline("until late Monday")[0]["tags"] == ["O", "B-TIME", "B-DAY"]


def test_what_only_a_summary_needs_is_not_there(recipe):
    bert = {"name": "bert", "width": 16, "heads": 2, "layers": 1}
    assert made({**recipe, "model": bert})[1].body.pooler is None


# Files as they are found.


def test_real_files_need_columns_and_nothing_else(tmp_path, recipe):
    (tmp_path / "a.conllu").write_text(
        "# text = don't go\n1-2\tdon't\t_\t_\n1\tdo\tdo\tAUX\n2\tn't\tnot\tPART\n2.1\tx\t_\tX\n3\tgo\tgo\tVERB\n\n"
        "# text = #1\n1\t#\t#\tSYM\n2\t1\t1\tNUM\n\n"
    )
    task, _ = made(recipe, f"data.train={tmp_path / 'a.conllu'}", "data.columns={words: 1, tags: 3}")
    assert task.labels.names == ("AUX", "NUM", "PART", "SYM", "VERB")
    (tmp_path / "b.txt").write_text("He PRP B-NP\nran VBD B-VP\n\n# SYM O\n")
    changes = ["data.format=conll", "data.columns={words: 0, tags: 2}"]
    task, _ = made(recipe, f"data.train={tmp_path / 'b.txt'}", *changes)
    assert task.labels.names == ("B-NP", "B-VP", "O")
