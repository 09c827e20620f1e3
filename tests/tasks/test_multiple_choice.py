"""Multiple choice: items, batches, losses and answers, with any number of choices and any encoder."""

import json

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.labelling import made
from torch.nn import functional as F

import weft
from weft.config.schema import Section
from weft.data.batching.packed_items import pack
from weft.data.truncation import TruncationPolicy
from weft.errors import ConfigError, DataError, RoleError
from weft.tasks.capabilities import WrongAnswer
from weft.tasks.multiple_choice import Choice, ChoiceConfig, ChoiceExample

quick = settings(
    deadline=None, derandomize=True, max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
LIMIT = TruncationPolicy(1024, "error")
ROWS = [
    ("the cat", ["sat down", "is red", "was two"], 0),
    ("the sum", ["sat down", "was two"], "was two"),
    ("my coat", ["was two", "is red", "sat down", "ran"], "1"),
    ("", ["ran", "is red"], None),
]
BERT = {"name": "bert", "width": 16, "heads": 2, "layers": 2, "max_positions": 32, "dropout": 0.0}
GPT = {"name": "gpt", "width": 16, "heads": 2, "layers": 2, "max_positions": 32, "dropout": 0.0}


def ask(text, choices, label=None):
    return ChoiceExample(text=text, choices=choices, label=label)


EXAMPLES = [ask(*row) for row in ROWS]
KNOWN = EXAMPLES[:3]


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(example.model_dump_json() + "\n" for example in KNOWN))
    return {
        "task": {"name": "choice", "dropout": 0.0},
        "data": {"train": str(path), "valid": str(path)},
        "tokenizer": {"name": "words"},
        "model": BERT,
        "train": {"steps": 60, "batch_tokens": 256, "lr": 0.003},
    }


def encoded(task, *examples, limit=LIMIT):
    return [item for items in task.encode_batch(examples, task.tokenizer, limit) for item in items]


def collated(task, *examples, limit=LIMIT):
    return task.collate(encoded(task, *examples, limit=limit), np.random.default_rng(0))


# Examples to batches.


@pytest.mark.parametrize("label", [2, "2", "red", "02"])
def test_the_right_choice_goes_by_its_number_or_its_text(label):
    assert ask("x", ["1", "b", "red"], label).label_index() == 2


def test_digits_are_a_number_where_there_is_such_a_choice():
    assert ask("2 + 2 =", ["2", "1", "4", "3"], "2").label_index() == 2  # as in CODAH
    assert ask("2 + 2 =", ["1", "4", "8", "9"], "4").label_index() == 1
    assert ask("x", ["a", "b"]).label_index() is None


@pytest.mark.parametrize(("first", "label"), [(1, 2), (1, "2"), ("A", "B"), ("a", "b"), ("A", "two")])
def test_labels_count_from_one_or_are_letters_where_the_recipe_says_so(first, label):
    example = Choice(ChoiceConfig(name="choice", first=first)).Example
    assert example(text="x", choices=["one", "two"], label=label).label_index() == 1
    with pytest.raises(ValueError, match=f"must be the number of a choice, {first} to "):
        example(text="x", choices=["one", "two"], label=0)


@pytest.mark.parametrize(
    ("choices", "label", "message"),
    [
        (["a", "b"], 2, "label: must be the number of a choice, 0 to 1, or its text, but is 2"),
        (["a", "b"], -1, "0 to 1, or its text, but is -1"),
        (["a", "b"], "c", "0 to 1, or its text, but is 'c'"),
        (["x", "y"], "A", "0 to 1, or its text, but is 'A'; task.first says how they count"),
        (["a", "b"], "²", "0 to 1, or its text, but is '²'"),
        (["a"], 0, "must have choices, two at least, and has 1"),
        ([], None, "must have choices, two at least, and has 0"),
        (["a", "b"], True, "valid"),
    ],
)
def test_one_that_cannot_be_is_refused(choices, label, message):
    with pytest.raises(ValueError, match=message):
        ask("x", choices, label)


def test_an_item_is_each_choice_with_the_text_between_their_signs(recipe):
    task, _ = made(recipe, "tokenizer.num_separators=2")
    special = task.tokenizer.specials
    text, *choices = task.tokenizer.ids(["the cat", "sat down", "is red", "was two"])
    ((ids, sizes, second, label),) = encoded(task, EXAMPLES[0])
    laid = [[special.bos, *text, special.eos, special.eos, *choice, special.eos] for choice in choices]
    assert ids.tolist() == [id for sequence in laid for id in sequence]
    assert (sizes.tolist(), second.tolist(), label.tolist()) == ([8, 8, 8], [5, 5, 5], [0])
    ((ids, sizes, second),) = encoded(task, EXAMPLES[3])
    assert (sizes.tolist(), second.tolist(), ids[:3].tolist()) == ([5, 6], [3, 3], [special.bos, *[special.eos] * 2])


def test_a_tokenizers_own_delimiter_stands_between(recipe):
    task, _ = made(recipe, "tokenizer.specials={sep: <sep>}", f"model={json.dumps(GPT)}")
    ((ids, *_),) = encoded(task, EXAMPLES[1])
    names = [task.tokenizer.token(int(id)) for id in ids[:7]]
    assert names == ["<s>", "the", "sum", "<sep>", "sat", "down", "</s>"]


def test_choices_of_all_questions_share_a_batch(recipe):
    task, _ = made(recipe)
    batch = collated(task, *KNOWN)
    assert batch.tokens.lengths.tolist() == [7, 7, 7, 7, 7, 7, 7, 7, 6]
    assert batch.positions.lengths.tolist() == [3, 2, 4]
    assert batch.positions.ids.tolist() == list(range(9))
    assert batch.targets.tolist() == [0, 4, 6]
    assert batch.counts == {"questions": 3}
    assert batch.tokens.split(batch.tokens.segments)[-1].tolist() == [0, 0, 0, 0, 1, 1]
    assert collated(task, *EXAMPLES).targets is None


def test_the_size_of_an_item_is_what_it_brings_to_a_batch(recipe):
    task, _ = made(recipe)
    items = encoded(task, *EXAMPLES)
    packed = pack(items, num_token_arrays=task.num_token_arrays)
    for index, size in enumerate(packed.sizes.tolist()):
        assert size == len(task.collate([packed[index]], np.random.default_rng(0)).tokens.ids)
    assert pack(items).sizes.tolist() != packed.sizes.tolist()  # were all arrays tokens


def test_what_is_prepared_in_16_bits_is_the_same(recipe):
    task, _ = made(recipe)
    narrow = [tuple(part.astype(np.uint16) for part in item) for item in encoded(task, *KNOWN)]
    ours, expected = task.collate(narrow, np.random.default_rng(0)), collated(task, *KNOWN)
    assert torch.equal(ours.tokens.segments, expected.tokens.segments)
    assert torch.equal(ours.targets, expected.targets)


def test_a_long_one_is_cut_the_longer_text_first_dropped_or_an_error(recipe):
    task, _ = made(recipe)
    long = ask("the cat sat down the cat", ["ran", "is red was two my"], 1)
    limit = TruncationPolicy(6, "cut")
    ((ids, sizes, second, _),) = encoded(task, long, limit=limit)
    assert (sizes.tolist(), second.tolist()) == ([9, 9], [7, 5])
    words = [task.tokenizer.token(int(id)) for id in ids]
    assert words[9:] == ["<s>", "the", "cat", "sat", "</s>", "is", "red", "was", "</s>"]
    assert str(limit) == "cut 1 sequence longer than data.max_length=6"
    assert encoded(task, long, limit=TruncationPolicy(6, "drop")) == []
    with pytest.raises(
        DataError, match="got 11 tokens, data.max_length is 6; set data.truncation: cut or drop, or raise"
    ):
        encoded(task, long, limit=TruncationPolicy(6, "error"))
    with pytest.raises(ConfigError, match="data.truncation: task 'choice' cannot use 'window'; try cut"):
        made(recipe, "data.truncation=window")


def test_what_the_model_cannot_read_is_told_before_it_learns(recipe, tmp_path):
    recipe["model"] = {**BERT, "max_positions": 6}
    with pytest.raises(DataError, match=r"data.train: a sequence has 7 tokens.* 6 positions; set data.max_length to 3"):
        weft.train(recipe, out=tmp_path / "run")
    weft.train(recipe, ["model.max_positions=7", "train.steps=1"], tmp_path / "run")


def test_many_are_encoded_as_one_by_one(recipe):
    task, _ = made(recipe)
    alone = [task.encode(example, task.tokenizer, LIMIT) for example in EXAMPLES]
    for ours, expected in zip(task.encode_batch(EXAMPLES, task.tokenizer, LIMIT), alone, strict=True):
        assert [[part.tolist() for part in item] for item in ours] == [
            [part.tolist() for part in item] for item in expected
        ]


# Losses and answers.


@torch.no_grad()
def test_the_loss_is_the_cross_entropy_within_each_question(recipe):
    task, head = made(recipe)
    head.double().eval()
    batch = collated(task, *KNOWN)
    scores = head.output(head.body.pooled_output(batch.tokens))[:, 0]
    each = zip(scores.split([3, 2, 4]), [0, 1, 1], strict=True)
    expected = sum(F.cross_entropy(logits[None], torch.tensor([label])) for logits, label in each)
    torch.testing.assert_close(head(batch)[0]["questions"], expected)
    over_all = F.cross_entropy(scores.expand(3, -1), batch.targets, reduction="sum")
    assert not torch.isclose(head(batch)[0]["questions"], over_all)


WORDS = st.lists(st.sampled_from(["the", "cat", "sat", "down", "is", "red", "was"]), max_size=5).map(" ".join)


@quick
@given(st.lists(st.tuples(WORDS, st.lists(WORDS, min_size=2, max_size=5)), min_size=1, max_size=4))
def test_a_question_alone_answers_as_in_any_batch(recipe, questions):
    task, head = _double_precision(recipe)
    examples = [ask(*question) for question in questions]
    with torch.no_grad():
        together = head.predict(collated(task, *examples), Section())
        alone = [head.predict(collated(task, example), Section())[0] for example in examples]
    for ours, expected, example in zip(together, alone, examples, strict=True):
        assert ours == pytest.approx(expected, abs=1e-12)
        assert len(ours) == len(example.choices)
        assert sum(ours) == pytest.approx(1)


@quick
@given(WORDS, st.permutations(["sat down", "is red", "was two", "my cat"]))
def test_the_order_of_choices_does_not_matter(recipe, text, choices):
    task, head = _double_precision(recipe)
    with torch.no_grad():
        first, second = head.predict(collated(task, ask(text, choices), ask(text, sorted(choices))), Section())
    assert dict(zip(choices, first, strict=True)) == pytest.approx(dict(zip(sorted(choices), second, strict=True)))


_kept = {}


def _double_precision(recipe):
    if not _kept:
        _kept["made"] = made(recipe)
        _kept["made"][1].double().eval()
    return _kept["made"]


def test_an_answer_has_the_number_the_text_and_the_scores():
    task = Choice(ChoiceConfig(name="choice"))
    answer = task.answer(EXAMPLES[0], [[0.2, 0.7, 0.1]])
    assert answer == {"choice": 1, "text": "is red", "scores": [0.2, 0.7, 0.1]}
    assert task.format_answer(answer) == "is red"
    assert task.preview(EXAMPLES[1]) == ("the sum | sat down | was two", "was two")
    assert task.preview(EXAMPLES[3]) == (" | ran | is red", "")
    assert task.score([answer, {"choice": 1}], EXAMPLES[:2]) == {"accuracy": 0.5}
    wrong, right = task.errors([answer, {"choice": 1}], EXAMPLES[:2])
    assert right is None
    assert wrong == WrongAnswer(EXAMPLES[0].choices[EXAMPLES[0].label_index()], "is red", 0.7)


@pytest.mark.parametrize("model", [BERT, GPT])
def test_it_learns_answers_and_reads_questions_from_json(recipe, tmp_path, model):
    pipeline = weft.train({**recipe, "model": model}, out=tmp_path / "run")
    assert [answer["choice"] for answer in pipeline(KNOWN)] == [0, 1, 1]
    assert pipeline.evaluate()["accuracy"] == 1
    question = json.dumps({"text": "the cat", "choices": ["is red", "sat down"]})
    assert pipeline(question)[0] == weft.load(tmp_path / "run")(question)[0]
    with pytest.raises(DataError, match='example 1: must be JSON, since it has several fields: {"text": "…", "choices'):
        pipeline("the cat")
    look = pipeline.attention(KNOWN[2])
    assert look.answer["text"] == "is red"
    names, chosen, batch = pipeline.teacher_forced(KNOWN[2])
    assert (names, chosen) == (["<s>", "my", "coat", "</s>", "is", "red", "</s>"], ["is", "red"])
    assert len(batch.tokens) == 1


@pytest.mark.parametrize(
    "model", [{"name": "rnn", "width": 8, "direction": "both", "chars": 4}, {"name": "cnn", "width": 12}]
)
def test_any_body_that_encodes_will_do(recipe, tmp_path, model):
    pipeline = weft.train({**recipe, "model": model}, ["train.steps=3"], tmp_path / "run")
    assert pipeline(EXAMPLES) == weft.load(tmp_path / "run")(EXAMPLES)
    names, chosen, batch = pipeline.teacher_forced(KNOWN[2])
    assert batch.tokens.chars is None or len(batch.tokens.chars) == len(names)
    assert names[-1 - len(chosen) : -1] == chosen


def test_a_model_that_does_not_encode_is_refused(recipe):
    with pytest.raises(RoleError, match="task 'choice' needs a model that encodes"):
        made({**recipe, "model": {"name": "ngram"}})


def test_a_table_has_a_choice_a_column(recipe, tmp_path):
    path = tmp_path / "codah.tsv"
    path.write_text(
        "".join(
            f"o\t{text}\tsat down\tis red\twas two\tran\t{number}\n"
            for text, number in [("the cat", 0), ("my coat", 1)]
        )
    )
    columns = "data.columns={text: 1, choices: [2, 3, 4, 5], label: 6}"
    pipeline = weft.train(
        recipe, [f"data.train={path}", f"data.valid={path}", columns, "train.steps=1"], tmp_path / "run"
    )
    assert len(pipeline.evaluate(str(path))) == 2
    path.write_text("o\tx\ta\tb\tc\td\t4\n")
    with pytest.raises(
        DataError, match=r"codah.tsv:1: label: must be the number of a choice, 0 to 3, or its text, but is '4'"
    ):
        pipeline.evaluate(str(path))


# Against transformers.


def test_logits_are_those_of_transformers(recipe):
    transformers = pytest.importorskip("transformers")
    from tests.bert_weights import copy_bert, padded, small_config

    task, head = made(recipe)
    head.eval()
    theirs = transformers.BertForMultipleChoice(small_config(len(task.tokenizer))).eval()
    copy_bert(theirs.bert, head.body)
    with torch.no_grad():
        head.output.weight.copy_(theirs.classifier.weight)
        head.output.bias.copy_(theirs.classifier.bias)
        batch = collated(task, EXAMPLES[0], ask("my coat", ["ran", "is red was two", "sat"], 1))
        ids, segments, mask = (part.view(2, 3, -1) for part in padded(batch.tokens))
        answer = theirs(ids, token_type_ids=segments, attention_mask=mask, labels=torch.tensor([0, 1]))
        torch.testing.assert_close(head.scores(batch.tokens).view(2, 3), answer.logits, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(head(batch)[0]["questions"] / 2, answer.loss, atol=1e-5, rtol=1e-5)
        other = theirs(ids, attention_mask=mask)
        assert not torch.allclose(head.scores(batch.tokens).view(2, 3), other.logits, atol=1e-4)
