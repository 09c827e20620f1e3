"""Text classification: items, batches, losses and answers; labels and class weights from the training data."""

import json
from dataclasses import replace

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import f1_score, matthews_corrcoef
from sklearn.utils.class_weight import compute_class_weight
from tests.labelling import made
from torch.nn import functional as F

import weft
from weft.config.recipes import read_recipe
from weft.config.run import Run
from weft.config.schema import Section
from weft.data.batching.packed_items import pack
from weft.data.labels import Labels
from weft.data.truncation import TruncationPolicy
from weft.errors import ConfigError, DataError, RoleError
from weft.tasks.capabilities import WrongAnswer
from weft.tasks.classification.targets import MAX_SCORES, MultiLabel, Regression, SingleLabel
from weft.tasks.classification.task import Classify, ClassifyConfig, ClassifyExample, RatedExample, Threshold
from weft.tasks.factory import make_task, resolve_run
from weft.tasks.text_pairs import TextTokens, truncate_pair

LIMIT = TruncationPolicy(1024, "error")
ROWS = [("so good", "good"), ("very good", "good"), ("fine", "good"), ("quite bad", "bad"), ("odd thing", "odd")]


@pytest.fixture
def rows(tmp_path):
    path = tmp_path / "rows.tsv"
    path.write_text("".join(f"{text}\t{label}\n" for text, label in ROWS), encoding="utf-8")
    return path


@pytest.fixture
def recipe(rows):
    return {
        "task": {"name": "classify"},
        "data": {"train": str(rows), "valid": str(rows)},
        "tokenizer": {"name": "words"},
        "model": {"name": "cnn", "width": 12, "embedding": 8},
        "train": {"steps": 60, "batch_tokens": 64, "lr": 0.02},
    }


@pytest.fixture
def rated(tmp_path, recipe):
    """How many words of a text are good, which a model that takes the maximum over a text can tell up to one."""
    path = tmp_path / "rated.tsv"
    path.write_text("so good\t1.5\nbad\t-0.5\nfine good\t2\nodd thing\t0\nodd bad\t-1e0\n")
    return {
        **recipe,
        "task": {"name": "classify", "regression": True},
        "data": {"train": str(path), "valid": str(path)},
    }


@pytest.fixture
def several(tmp_path, recipe):
    path = tmp_path / "several.csv"
    path.write_text('text,labels\nred fish,"red,fish"\nred,red\nblue,\nfish,fish\nblue fish,"fish, blue"\n')
    return {**recipe, "task": {"name": "classify", "multiple": True}, "data": {"train": str(path), "valid": str(path)}}


def ask(text, label=None, **rest):
    return ClassifyExample(text=text, label=label, **rest)


def encoded(task, *examples, limit=LIMIT):
    return [item for items in task.encode_batch(examples, task.tokenizer, limit) for item in items]


def collated(task, *examples):
    return task.collate(encoded(task, *examples), np.random.default_rng(0))


# Examples to batches.


def test_an_item_is_the_text_between_its_signs_and_the_label(recipe):
    task, _ = made(recipe)
    special, (so, very) = task.tokenizer.specials, task.tokenizer.ids(["so good", "very"])
    ((ids, second, label),) = encoded(task, ask("so good", "odd"))
    assert ids.tolist() == [special.bos, *so, special.eos]
    assert (second.tolist(), label.tolist()) == ([], [2])  # bad, good, odd
    ((ids, second),) = encoded(task, ask("so good", pair="very"))
    assert ids.tolist() == [special.bos, *so, special.eos, *very, special.eos]
    assert second.tolist() == [4]
    ((ids, second),) = encoded(task, ask("so good", pair=""))
    assert ids.tolist() == [special.bos, *so, special.eos, special.eos]


def test_many_are_encoded_as_one_by_one(recipe):
    task, _ = made(recipe)
    examples = [ask(*row) for row in ROWS] + [ask(""), ask("good", pair="bad"), ask("good", "bad", pair="")]
    alone = [task.encode(example, task.tokenizer, LIMIT) for example in examples]
    together = task.encode_batch(examples, task.tokenizer, LIMIT)
    plain = [[[list(map(list, item)) for item in items] for items in side] for side in (alone, together)]
    assert plain[0] == plain[1]


def test_a_batch_has_segments_where_there_are_pairs_and_targets_where_all_labels_are_known(recipe):
    task, _ = made(recipe)
    batch = collated(task, ask("so good", "good"), ask("bad", "bad"))
    assert batch.tokens.segments is None
    assert batch.targets.tolist() == [1, 0]
    assert batch.counts == {"texts": 2}
    assert batch.size == 7
    batch = collated(task, ask("so good", "good"), ask("bad", pair="very bad"))
    assert batch.tokens.segments.tolist() == [0, 0, 0, 0, 0, 0, 0, 1, 1, 1]
    assert batch.targets is None


def test_labels_do_not_count_as_tokens_of_a_batch(recipe):
    task, _ = made(recipe)
    items = encoded(task, *(ask(*row) for row in ROWS))
    assert pack(items, num_token_arrays=task.num_token_arrays).sizes.tolist() == [len(item[0]) for item in items]


# Too long.


@pytest.mark.parametrize(("policy", "sizes"), [("cut", [(3, 3)]), ("drop", [])])
def test_a_pair_is_limited_as_a_whole(recipe, policy, sizes):
    task, limit = made(recipe)[0], TruncationPolicy(6, policy)
    items = encoded(task, ask("a b c d e", pair="f g h i"), limit=limit)
    assert [(second[0] - 2, len(ids) - second[0] - 1) for ids, second in items] == sizes
    assert "1 sequence longer than data.max_length=6" in str(limit)
    assert encoded(task, ask("a b", pair="f g h i"), limit=limit)


def test_a_long_text_is_an_error_unless_the_recipe_says(recipe):
    task, _ = made(recipe)
    with pytest.raises(
        DataError, match="got 4 tokens, data.max_length is 3; set data.truncation: cut or drop, or raise"
    ):
        encoded(task, ask("a b", pair="c d"), limit=TruncationPolicy(3, "error"))
    with pytest.raises(ConfigError, match="data.truncation: task 'classify' cannot use 'window'; try cut"):
        made(recipe, "data.truncation=window")


@given(st.integers(0, 9), st.integers(0, 9), st.integers(0, 18))
def test_the_longer_of_a_pair_is_cut_first_as_bert_does(first, second, room):
    text, pair = list(range(first)), list(range(second))
    expected_text, expected_pair = list(text), list(pair)
    while len(expected_text) + len(expected_pair) > room:
        longer = expected_text if len(expected_text) > len(expected_pair) else expected_pair
        longer.pop()
    assert truncate_pair(spelt(text), spelt(pair), room) == (spelt(expected_text), spelt(expected_pair))
    assert truncate_pair(TextTokens(text), TextTokens(pair), room) == (
        TextTokens(expected_text),
        TextTokens(expected_pair),
    )


def spelt(ids):
    return TextTokens(ids, [str(id) for id in ids])


# The loss.


@torch.no_grad()
def test_the_loss_is_the_cross_entropy_on_the_summary(recipe):
    task, head = made(recipe)
    batch = collated(task, *(ask(*row) for row in ROWS))
    (sums, carry), logits = head.eval()(batch), head.output(head.body.pooled_output(batch.tokens))
    assert carry is None
    torch.testing.assert_close(sums["texts"], F.cross_entropy(logits, torch.tensor([1, 1, 1, 0, 2]), reduction="sum"))


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_weights_multiply_the_gradient_of_their_labels_in_training_alone(recipe, smoothing):
    changes = ["task.dropout=0", f"task.label_smoothing={smoothing}", "task.weights={bad: 3.0, odd: 0.5}"]
    task, head = made(recipe, *changes)
    batch = collated(task, *(ask(*row) for row in ROWS))
    parameters = list(head.parameters())
    ours = torch.autograd.grad(head.train()(batch)[0]["texts"], parameters)
    logits, weights = (
        head.output(head.body.pooled_output(batch.tokens)),
        torch.tensor([3.0, 1.0, 0.5]),
    )  # bad, good, odd
    log_probs = logits.log_softmax(-1)
    soft_targets = F.one_hot(batch.targets, 3) * (1 - smoothing) + smoothing / 3
    expected = torch.autograd.grad(-(weights[batch.targets, None] * soft_targets * log_probs).sum(), parameters)
    for mine, yours in zip(ours, expected, strict=True):
        torch.testing.assert_close(mine, yours)
    unweighted = torch.autograd.grad(
        -(soft_targets * head.output(head.body.pooled_output(batch.tokens)).log_softmax(-1)).sum(), parameters
    )
    assert not torch.allclose(ours[-1], unweighted[-1])
    with torch.no_grad():
        measured = F.cross_entropy(logits, batch.targets, reduction="sum")
        torch.testing.assert_close(head.eval()(batch)[0]["texts"], measured)


def test_dropout_is_on_the_summary_and_in_training_alone(recipe):
    task, head = made(recipe, "task.dropout=0.5")
    batch = collated(task, ask("so good", "good"))
    assert torch.equal(head.eval()(batch)[0]["texts"], head(batch)[0]["texts"])
    head.train()
    with torch.no_grad():
        assert len({float(head(batch)[0]["texts"]) for _ in range(8)}) > 1


@torch.no_grad()
def test_a_text_alone_answers_as_in_any_batch(recipe):
    task, head = made(recipe)
    head.double().eval()
    examples = [ask(text) for text, _ in ROWS] + [ask(""), ask("so good", pair="very bad")]
    scores = [head.scores(head.body.pooled_output(collated(task, example).tokens)) for example in examples]
    torch.testing.assert_close(
        head.scores(head.body.pooled_output(collated(task, *examples).tokens)), torch.cat(scores)
    )


def test_what_only_a_summary_needs_is_not_there_where_layers_are_mixed(recipe):
    recipe = {**recipe, "model": {"name": "bert", "width": 16, "heads": 2, "layers": 1}}
    assert made(recipe)[1].body.pooler is not None
    assert made(recipe, "task.layers=mix")[1].body.pooler is None


# Labels from the data.


def test_labels_are_those_of_the_training_data_in_alphabetical_order(recipe):
    run = Run.parse(recipe)
    assert resolve_run(run, make_task(run)).task.labels == ("bad", "good", "odd")


def test_labels_that_are_listed_stay_and_nothing_is_read(recipe):
    run = Run.parse(read_recipe(recipe, ["task.labels=[odd, good, bad]", "task.pairs=false"]))
    task = make_task(run)
    assert task.resolve_config(iter(lambda: pytest.fail("the data was read"), None)) == run.task
    assert resolve_run(run, task) == run


def test_one_row_says_whether_texts_come_in_pairs_where_labels_are_listed(recipe):
    task = make_task(Run.parse(read_recipe(recipe, ["task.labels=[same, other]"])))
    rows = iter([ClassifyExample(text="a", pair="b", label="same"), ClassifyExample(text="a", label="other")])
    assert task.resolve_config(rows).pairs is True
    assert len(list(rows)) == 1


@pytest.mark.parametrize(("pairs", "all_pairs"), [(["b", "c"], True), ([None, None], False), (["b", None], False)])
def test_a_model_of_pairs_is_one_whose_texts_all_come_in_pairs(recipe, pairs, all_pairs):
    task = make_task(Run.parse(read_recipe(recipe)))
    rows = [ClassifyExample(text="a", pair=pair, label=str(number)) for number, pair in enumerate(pairs)]
    config = task.resolve_config(rows)
    assert config.pairs is all_pairs
    task.configure(config)
    assert ("pair: required" in task.unavailable_answer(ClassifyExample(text="a"))) is all_pairs
    assert task.unavailable_answer(rows[0]) == ""


def test_balanced_weights_are_scikit_learns(recipe):
    run = Run.parse(read_recipe(recipe, ["task.weights=balanced"]))
    resolved = resolve_run(run, make_task(run))
    labels, gold = np.array(["bad", "good", "odd"]), [label for _, label in ROWS]
    expected = compute_class_weight("balanced", classes=labels, y=gold)
    assert [resolved.task.weights[label] for label in labels] == pytest.approx(expected.tolist())
    assert make_task(resolved).weights().tolist() == pytest.approx(expected.tolist())
    assert Run.parse(resolved.dump()) == resolved


def test_one_label_is_nothing_to_tell_apart(recipe, rows):
    rows.write_text("a\tx\nb\tx\n")
    with pytest.raises(DataError, match="data.train: its labels are 'x', where the least .* is 2 different labels"):
        made(recipe)


def test_none_at_all_is_nothing_to_learn_from(several, tmp_path):
    (tmp_path / "several.csv").write_text("text,labels\nred,\nblue,\n")
    with pytest.raises(DataError, match="its labels are none, where the least to learn from is 1 different label; see"):
        made(several)


@pytest.mark.parametrize("label", ["", " "])
def test_a_blank_label_is_no_class_but_a_bad_row(recipe, tmp_path, label):
    path = tmp_path / "blank.jsonl"
    path.write_text("".join(f'{{"text": "a", "label": "{name}"}}\n' for name in ("x", "y", label)))
    changes = [f"data.train={path}", "data.valid=null"]
    with pytest.raises(DataError, match=r"blank.jsonl:3: label: must have a name, and not be blank, but is"):
        made(recipe, *changes)
    assert made(recipe, *changes, "data.on_bad_rows=skip")[0].labels.names == ("x", "y")


def test_balanced_weights_pass_over_what_is_not_listed_and_its_row_is_named(recipe, rows, tmp_path):
    rows.write_text("a\tx\nb\ty\nc\tx\nd\tzzz\n")
    changes = ["task.labels=[x, y]", "task.weights=balanced", "train.steps=1"]
    assert made(recipe, *changes)[0].config.weights == pytest.approx({"x": 3 / 4, "y": 3 / 2})
    with pytest.raises(DataError, match=r"rows.tsv:4: the label 'zzz' is not in task.labels"):
        weft.train(recipe, changes, tmp_path / "run")
    weft.train(recipe, [*changes, "data.on_bad_rows=skip"], tmp_path / "skipping")


def test_an_answer_needs_no_label_that_is_known(recipe, tmp_path):
    pipeline = weft.train(recipe, ["train.steps=1"], tmp_path / "run")
    assert pipeline({"text": "so good", "label": "strange"}) == pipeline("so good")
    with pytest.raises(DataError, match=r"example 1: the label 'strange' is not in task.labels"):
        pipeline.evaluate([{"text": "so good", "label": "strange"}])


def test_a_label_that_is_not_known_names_its_row(recipe, tmp_path):
    (tmp_path / "valid.tsv").write_text("fine\tgood\nfine\tgod\n")
    with pytest.raises(DataError, match=r"valid.tsv:2: the label 'god' is not in task.labels.*did you mean 'good'"):
        weft.train(recipe, [f"data.valid={tmp_path / 'valid.tsv'}"], tmp_path / "run")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("task.labels=[a, b, a]", "task.labels: must have each label once, and has 'a' 2 times"),
        ("task.labels=[]", "task.labels: must have a label, or be left out"),
        ("task.weights={bda: 2.0}", "task.weights: 'bda' is no label; did you mean 'bad'?"),
        ("task.weights={bad: 0}", "task.weights: must be balanced, or a weight above 0 for each label named, such as"),
        ("task.weights={bad: x}", "task.weights: must be balanced, or .*, but is {'bad': 'x'} instead"),
        ("task.weights=blanced", "task.weights: must be balanced, or .*, but is 'blanced' instead"),
        ("task.weights={bad: .inf}", "^task.weights: must be balanced, .* above 1e[+]12, but is {'bad': inf}"),
        ("task.weights={bad: 1e30}", "^task.weights: must be balanced, or .*, but is {'bad': 1e[+]30} instead$"),
        ("task.weights={true: 2}", '^task.weights: must be text: put it in quotes, "true", but is {True: 2} instead$'),
        ("task.labels=bad", r"^task.labels: must be a list, such as \[a, b\], but is 'bad' instead$"),
        ("model.kernels=3", r"^model.kernels: must be a list, such as \[a, b\], but is 3 instead$"),
        ("task.labels=[true, b]", '^task.labels.0: must be text: put it in quotes, "true", but is True instead$'),
        ("task.labels=[a, 1.0]", '^task.labels.1: must be text: put it in quotes, "1.0", but is 1.0 instead$'),
        ("task.labels=[a, '']", "^task.labels.1: must have a name, and not be blank, but is '' instead$"),
        ("task.threshold=0.3", "task.threshold chooses among several labels a text, but is 0.3 for one; set task.mul"),
        ("train.metric=f1", "train.metric: the task has no metric 'f1'; known: accuracy, loss, macro_f1, matth"),
        ("task.treshold=0.4", "task.treshold: unknown key; did you mean 'threshold'"),
        ("task={name: classify, regression: true, multiple: true}", "task.multiple is of labels, and with task.regr"),
        ("task={name: classify, regression: true, labels: [a, b]}", "task.labels is of labels, and .* leave one out"),
        (
            "task={name: classify, regression: true, label_smoothing: 0.1}",
            "task.label_smoothing is of labels, and with task.reg",
        ),
    ],
)
def test_a_wrong_recipe_is_refused_with_the_remedy(recipe, change, message):
    with pytest.raises(ConfigError, match=message):
        made(recipe, change)


def test_a_model_that_does_not_encode_is_refused(recipe):
    with pytest.raises(RoleError, match="task 'classify' needs a model that encodes; 'ngram', as configured, scores"):
        made({**recipe, "model": {"name": "ngram"}})


# Answers.


def classify(labels=("bad", "good", "odd"), **config):
    return Classify(ClassifyConfig(name="classify", labels=labels, **config))


def test_an_answer_has_the_scores_from_the_likeliest_down():
    answer = classify().answer(ask("x"), [([1], [0.2, 0.7, 0.1])])
    assert answer == {"label": "good", "scores": {"good": 0.7, "bad": 0.2, "odd": 0.1}}
    assert list(answer["scores"]) == ["good", "bad", "odd"]
    assert classify().format_answer(answer) == "good"
    assert classify().format_answer({"label": "two\nlines"}) == "two lines"


def test_what_is_shown_of_an_example():
    assert classify().preview(ask("a", "bad", pair="b")) == ("a | b", "bad")
    assert classify(multiple=True).preview(ask("a", labels=["odd", "bad", "odd"])) == ("a", "odd, bad")


def test_scores_and_confusion_go_by_label():
    answers = [{"label": label} for label in ("good", "good", "bad")]
    examples = [ask("x", label) for label in ("good", "odd", "bad")]
    metrics = classify().score(answers, examples)
    assert (metrics["accuracy"], metrics["macro_f1"]) == pytest.approx((2 / 3, (2 / 3 + 0 + 1) / 3))
    assert metrics["matthews"] == pytest.approx(matthews_corrcoef(["good", "odd", "bad"], ["good", "good", "bad"]))
    assert set(metrics) == set(classify().metrics) == {"accuracy", "macro_f1", "matthews"}
    assert classify().confusion(answers, examples).counts == [[1, 0, 0], [0, 1, 0], [0, 1, 0]]


def test_of_two_labels_the_second_is_the_one_that_is_looked_for():
    task = classify(("no", "yes"))
    predicted, gold = ["yes", "yes", "no", "no", "yes"], ["yes", "no", "no", "yes", "yes"]
    metrics = task.score([{"label": label} for label in predicted], [ask("x", label) for label in gold])
    assert metrics["f1"] == pytest.approx(f1_score(gold, predicted, pos_label="yes")) == pytest.approx(2 / 3)
    assert f1_score(gold, predicted, pos_label="no") != pytest.approx(metrics["f1"])  # the control: the other one
    assert task.metrics == tuple(metrics) == ("accuracy", "macro_f1", "matthews", "f1")


def test_the_positive_label_is_the_second_of_two():
    assert classify(("no", "yes")).positive_label == "yes"
    assert classify(("yes", "no")).positive_label == "no"
    for other in (classify(), classify(("no", "yes"), multiple=True), classify(None), classify(None, regression=True)):
        assert other.positive_label is None


def test_a_report_has_each_label_that_is_there():
    answers = [{"label": label} for label in ("good", "good", "bad")]
    examples = [ask("x", label) for label in ("good", "bad", "bad")]
    report = classify().report(answers, examples)
    assert list(report.classes) == ["bad", "good"]
    assert (report.classes["bad"].precision, report.classes["bad"].recall, report.classes["bad"].support) == (1, 0.5, 2)
    metrics = classify().score(answers, examples)
    assert (report.averages["micro"].f1, report.averages["macro"].f1) == pytest.approx(
        (metrics["accuracy"], metrics["macro_f1"])
    )


def test_of_several_labels_a_text_each_is_reported():
    task, gold = classify(multiple=True), [["bad", "odd"], [], ["odd", "odd"]]
    answers = [{"labels": ["odd"]}, {"labels": []}, {"labels": ["bad", "odd"]}]
    examples = [ask("x", labels=labels) for labels in gold]
    report = task.report(answers, examples)
    assert list(report.classes) == ["bad", "good", "odd"]
    assert report.classes["odd"].support == 2
    metrics = task.score(answers, examples)
    assert report.averages["micro"].f1 == pytest.approx(metrics["micro_f1"])
    assert report.averages["macro"].f1 == pytest.approx(metrics["macro_f1"])
    assert report.averages["samples"].f1 == pytest.approx((2 / 3 + 0 + 2 / 3) / 3)


def test_numbers_have_no_report():
    assert classify(None, regression=True).report([{"score": 1.0}], [RatedExample(text="x", label=1.0)]) is None


def test_wrong_labels_are_errors_with_their_probability():
    answers = [{"label": label, "scores": {"good": 0.7, "bad": 0.2, "odd": 0.1}} for label in ("good", "good")]
    assert classify().errors(answers, [ask("x", "good"), ask("x", "bad")]) == [None, WrongAnswer("bad", "good", 0.7)]


def test_of_several_labels_the_most_confident_wrong_decision_is_the_score():
    task, scores = classify(multiple=True), {"good": 0.6, "odd": 0.3, "bad": 0.05}
    answers = [{"labels": ["good"], "scores": scores}] * 4
    gold = [["good"], [], ["good", "bad"], ["odd", "bad"]]
    errors = task.errors(answers, [ask("x", labels=labels) for labels in gold])
    assert [error and error.score for error in errors] == [None, 0.6, 0.95, 0.95]
    assert (errors[2].gold, errors[2].predicted) == (["good", "bad"], ["good"])


def test_of_numbers_the_furthest_is_the_worst():
    task = classify(None, regression=True)
    examples = [RatedExample(text="x", label=label) for label in (1.0, 3.5, 0.5)]
    errors = task.errors([{"score": 1.0}] * 3, examples)
    assert errors == [None, WrongAnswer(3.5, 1.0, 2.5), WrongAnswer(0.5, 1.0, 0.5)]


def test_a_run_may_go_by_any_metric_of_its_labels(recipe, rows, tmp_path):
    rows.write_text("so good\t1\nvery good\t1\nquite bad\t0\nodd\t0\n")
    for metric in ("f1", "matthews"):
        pipeline = weft.train(recipe, [f"train.metric={metric}", "train.steps=40"], tmp_path / metric)
        assert pipeline.evaluate()[metric] == 1


def test_it_learns_and_knows_how_sure_it_is(recipe, tmp_path):
    pipeline = weft.train(recipe, out=tmp_path / "run")
    answers = pipeline([text for text, _ in ROWS])
    assert [answer["label"] for answer in answers] == [label for _, label in ROWS]
    for answer in answers:
        assert sum(answer["scores"].values()) == pytest.approx(1, abs=1e-5)
        assert answer["label"] == next(iter(answer["scores"]))
    assert pipeline.evaluate()["accuracy"] == 1
    assert pipeline.evaluate_in_detail().confusion.counts == [[1, 0, 0], [0, 3, 0], [0, 0, 1]]
    names, labels, batch = pipeline.task.teacher_forced(
        pipeline.task.encode(pipeline.example("so good"), pipeline.tokenizer, LIMIT), [([1], [])]
    )
    assert (names, labels, batch.targets.tolist()) == (["<s>", "so", "good", "</s>"], ["good"], [1])


def test_it_learns_from_pairs(recipe, tmp_path):
    words = ("red", "blue", "green", "pink")
    rows = [(a, "same" if a == b else "other", b) for a in words for b in words]
    (tmp_path / "pairs.tsv").write_text("".join("\t".join(row) + "\n" for row in rows))
    changes = [f"data.train={tmp_path / 'pairs.tsv'}", f"data.valid={tmp_path / 'pairs.tsv'}", "task.weights=balanced"]
    pipeline = weft.train(recipe, [*changes, "train.steps=250", "model.width=48"], tmp_path / "run")
    assert pipeline.evaluate()["accuracy"] > 0.9
    assert pipeline([{"text": "red", "pair": "red"}])[0]["label"] == "same"


# Several labels a text.


@torch.no_grad()
def test_the_loss_of_several_is_that_of_as_many_questions(several):
    task, head = made(several, "task.weights={fish: 2.0}", "task.dropout=0", "task.label_smoothing=0.1")
    batch = collated(task, ask("red fish", labels=["fish", "red"]), ask("blue", labels=[]))
    assert batch.targets.tolist() == [[0, 1, 1], [0, 0, 0]]  # blue, fish, red
    probabilities = head.output(head.body.pooled_output(batch.tokens)).sigmoid()
    targets = batch.targets
    torch.testing.assert_close(
        head.eval()(batch)[0]["texts"],
        -(targets * probabilities.log() + (1 - targets) * (1 - probabilities).log()).sum(),
    )
    soft, weights = targets * 0.9 + 0.05, torch.tensor([1.0, 2.0, 1.0])
    torch.testing.assert_close(
        head.train()(batch)[0]["texts"],
        -(weights * soft * probabilities.log() + (1 - soft) * (1 - probabilities).log()).sum(),
    )


def test_balanced_weights_of_several_weigh_each_against_its_absence(several):
    task, _ = made(several, "task.weights=balanced")
    assert task.config.weights == pytest.approx({"fish": 2 / 3, "red": 3 / 2, "blue": 4})


def test_several_are_those_above_the_threshold(several):
    task, head = made(several)
    assert task.options() == Threshold(threshold=0.5)
    assert made(several, "task.threshold=0.2")[0].options() == Threshold(threshold=0.2)
    assert (task.metric, task.metrics) == ("micro_f1", ("micro_f1", "macro_f1", "exact_match"))
    batch = collated(task, ask("red fish"), ask("blue"))
    assert batch.targets is None
    with torch.no_grad():
        (_, probabilities), _ = head.eval().predict(batch, Threshold(threshold=0.5))
        for threshold in (0.001, sorted(probabilities)[1], 0.999):
            chosen, _ = head.predict(batch, Threshold(threshold=threshold))[0]
            assert chosen == [index for index, probability in enumerate(probabilities) if probability > threshold]
    answer = task.answer(ask("x"), [([1, 2], [0.1, 0.6, 0.8])])
    assert answer == {"labels": ["red", "fish"], "scores": {"red": 0.8, "fish": 0.6, "blue": 0.1}}
    assert task.format_answer(answer) == "red, fish"
    assert task.answer(ask("x"), [([], [0.1, 0.3, 0.2])])["labels"] == []
    assert task.confusion([answer], [ask("x", labels=[])]) is None


def test_several_are_learnt_and_the_threshold_can_be_set_in_a_call(several, tmp_path):
    pipeline = weft.train(several, ["train.steps=150"], tmp_path / "run")
    metrics = pipeline.evaluate()
    assert metrics["exact_match"] == metrics["micro_f1"] == metrics["macro_f1"] == 1
    assert set(pipeline("red fish")[0]["labels"]) == {"red", "fish"}
    assert len(pipeline("red", {"threshold": 1e-30})[0]["labels"]) == 3
    changes = ["task.multiple=false", "data.columns={text: 0, label: 1}", "data.on_bad_rows=skip", "train.steps=1"]
    pipeline = weft.train(several, changes, tmp_path / "1")
    assert pipeline.task.options() == Section()
    with pytest.raises(ConfigError, match=r"options.threshold: the task 'classify', as configured, has no options"):
        pipeline("red", {"threshold": 0.1})


def test_a_row_without_its_label_cannot_teach(recipe, several, tmp_path):
    with pytest.raises(DataError, match=r"several.csv:2: label: required to train or evaluate"):
        made(several, "task.multiple=false")
    with pytest.raises(DataError, match=r"rows.tsv:1: labels: required to train or evaluate"):
        made(recipe, "task.multiple=true")


@pytest.mark.parametrize(
    ("raw", "known"),
    [
        ({"label": 3}, "3"),
        ({"labels": [1, "b"]}, ["1", "b"]),
        ({"labels": "4, 27"}, ["4", "27"]),
        ({"labels": ""}, []),
    ],
)
def test_numbers_are_names_too_and_a_cell_may_hold_several(raw, known):
    example = ClassifyExample.model_validate({"text": "x", **raw})
    assert (example.label or example.labels) == known or example.labels == known


@pytest.mark.parametrize("raw", [{"label": True}, {"label": 1.5}, {"labels": [["a"]]}, {"text": 3}, {"txet": "a"}])
def test_what_is_no_example_is_refused(raw):
    with pytest.raises(ValueError, match="validation error"):
        ClassifyExample.model_validate({"text": "x", **raw})


def test_a_table_with_a_header_and_the_label_first(tmp_path, recipe):
    (tmp_path / "a.tsv").write_text("label\tsentence\n0\tso bad\n1\tso good\n")
    (tmp_path / "b.tsv").write_text("label\tcontent\n1\tgood\n")
    changes = [f"data.train={tmp_path / 'a.tsv'}", f"data.valid={tmp_path / 'b.tsv'}"]
    pipeline = weft.train(recipe, [*changes, "data.header=true", "data.columns={text: 1, label: 0}"], tmp_path / "run")
    assert pipeline.run.task.labels == ("0", "1")
    assert pipeline("so good")[0]["label"] == "1"


# A number a text.


@torch.no_grad()
def test_the_loss_of_numbers_is_the_squared_error_of_one_output(rated):
    task, head = made(rated)
    examples = [RatedExample(text="so good", label=1.5), RatedExample(text="bad", label=-100.0)]
    batch = collated(task, *examples)
    assert batch.targets.tolist() == [1.5, -100.0]
    assert head.output.out_features == 1
    values = head.eval().output(head.body.pooled_output(batch.tokens))[:, 0]
    torch.testing.assert_close(head(batch)[0]["texts"], (values - torch.tensor([1.5, -100.0])).square().sum())
    assert [output[1] for output in head.predict(batch, task.options())] == [[value] for value in values.tolist()]
    assert collated(task, RatedExample(text="so good"), examples[0]).targets is None


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=5))
def test_an_item_holds_any_number(numbers):
    task = Classify(ClassifyConfig(name="classify", regression=True))
    labels = [task.kind.encode_label(RatedExample(text="x", label=number), task.labels) for number in numbers]
    packed = pack([(bits,) for bits in labels])
    assert task.kind.targets([packed[n][0] for n in range(len(numbers))], 0).tolist() == numbers


@pytest.mark.parametrize("raw", ["good", "", "nan", "1e999", True, [1], 1e39])
def test_a_label_that_is_no_number_is_refused_with_its_place(rated, tmp_path, raw):
    with pytest.raises(ValueError, match="must be a number, since task.regression is true"):
        RatedExample(text="x", label=raw)
    if isinstance(raw, str):
        (tmp_path / "rated.tsv").write_text(f"so good\t1\nbad\t{raw or ' '}\n")
        with pytest.raises(DataError, match=r"rated.tsv:2: label: must be a number, since task.regression is true"):
            weft.train(rated, ["train.steps=1"], tmp_path / "run")


def test_numbers_are_learnt_and_judged_by_their_order(rated, tmp_path):
    pipeline = weft.train(rated, ["train.steps=200", "task.dropout=0"], tmp_path / "run")
    assert (pipeline.task.metric, pipeline.task.metrics) == ("spearman", ("spearman", "pearson"))
    answers = pipeline(["so good", "bad", "fine good"])
    assert [set(answer) for answer in answers] == [{"score"}] * 3
    assert [answer["score"] for answer in answers] == pytest.approx([1.5, -0.5, 2], abs=0.2)
    metrics = pipeline.evaluate()
    predicted = [answer["score"] for answer in pipeline(["so good", "bad", "fine good", "odd thing", "odd bad"])]
    gold = [1.5, -0.5, 2, 0, -1]
    assert metrics["spearman"] == pytest.approx(scipy.stats.spearmanr(predicted, gold).statistic)
    assert metrics["pearson"] == pytest.approx(scipy.stats.pearsonr(predicted, gold).statistic)
    apart = [{"text": "so good", "label": 4}, {"text": "bad", "label": 1.5}]
    assert pipeline.evaluate(apart)["loss"] == pytest.approx(((predicted[0] - 4) ** 2 + (predicted[1] - 1.5) ** 2) / 2)
    assert pipeline.evaluate_in_detail().confusion is None
    assert weft.load(tmp_path / "run")("so good") == pipeline("so good")
    assert pipeline.run.task.labels is None
    example = pipeline.example({"text": "so good", "label": "1.50"})
    assert pipeline.task.format_answer(answers[0]) == json.dumps(answers[0]["score"])
    assert pipeline.task.preview(example) == ("so good", "1.5")
    names, predicted, batch = pipeline.teacher_forced("so good")
    assert (names, predicted) == (["<s>", "so", "good", "</s>"], [json.dumps(answers[0]["score"])])
    assert batch.targets.tolist() == pytest.approx([answers[0]["score"]], abs=1e-5)


# How a pair is laid out.


@pytest.mark.parametrize(
    ("specials", "separators", "between"),
    [(None, 1, "</s>"), (None, 2, "</s> </s>"), ({"sep": "<|delim|>"}, 1, "<|delim|>"), ({"sep": "<|d|>"}, 2, "<|d|>")],
)
def test_what_stands_between_the_texts_of_a_pair_is_the_tokenizers(recipe, specials, separators, between):
    task, _ = made({**recipe, "tokenizer": {"name": "words", **({"specials": specials} if specials else {})}})
    task.tokenizer.config = task.tokenizer.config.model_copy(update={"num_separators": separators})
    ((ids, second),) = encoded(task, ask("so good", pair="very bad"))
    assert " ".join(map(task.tokenizer.token, ids)) == f"<s> so good {between} very bad </s>"
    assert task.tokenizer.token(int(ids[second[0]])) == "very"
    segments = collated(task, ask("so good", pair="very bad")).tokens.segments.tolist()
    assert segments == [0] * (3 + len(between.split())) + [1] * 3
    assert task.num_special_tokens == len(ids) - 4
    ((ids, second),) = encoded(task, ask("so good"))
    assert (" ".join(map(task.tokenizer.token, ids)), second.tolist()) == ("<s> so good </s>", [])


# Pairs with no order.


@pytest.fixture(params=["cnn", "gpt", "bert"])
def bodies(request, recipe, tmp_path):
    (tmp_path / "pairs.tsv").write_text("so good\tsame\tvery good\nbad\tother\tso good\nodd thing\tsame\todd\n")
    data = {"train": str(tmp_path / "pairs.tsv"), "valid": str(tmp_path / "pairs.tsv")}
    sizes = {"width": 16, "heads": 2, "layers": 2, "max_positions": 64, "dropout": 0}
    model = recipe["model"] if request.param == "cnn" else {"name": request.param, **sizes}
    return {**recipe, "data": data, "model": model, "tokenizer": {"name": "words", "specials": {"sep": "<|d|>"}}}


@torch.no_grad()
def test_the_summaries_of_both_orders_are_added_before_the_output(bodies):
    task, head = made(bodies, "task.symmetric=true")
    head.double().eval()
    there, back = ask("so good", "same", pair="bad"), ask("bad", "same", pair="so good")
    batch, one_way = collated(task, there), made(bodies)[0]
    both = [collated(one_way, example).tokens for example in (there, back)]
    for side, expected in zip((batch.tokens, batch.source), both, strict=True):
        assert side.ids.tolist() == expected.ids.tolist()
        assert side.segments.tolist() == expected.segments.tolist()
    added = head.output(sum(head.body.pooled_output(tokens) for tokens in both))
    ((_, probabilities),) = head.predict(batch, task.options())
    torch.testing.assert_close(torch.tensor(probabilities).double(), added.softmax(-1)[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(head(batch)[0]["texts"], F.cross_entropy(added, batch.targets))
    ((_, turned),) = head.predict(collated(task, back), task.options())
    assert turned == pytest.approx(probabilities)
    # the control: one order alone tells them apart
    forward, backward = (head.output(head.body.pooled_output(tokens)).softmax(-1)[0] for tokens in both)
    assert bodies["model"]["name"] == "cnn" or not torch.allclose(forward, backward, rtol=1e-9, atol=0)


def test_both_orders_count_as_what_a_batch_reads(bodies):
    task, head = made(bodies, "task.symmetric=true")
    items = encoded(task, ask("so good", "same", pair="bad"), ask("odd", "same", pair="thing"))
    data = pack(items, num_token_arrays=task.num_token_arrays)
    assert data.sizes.tolist() == [12, 10]
    assert task.sequence_lengths(data).tolist() == [[6, 5], [6, 5]]
    batch = task.collate(items, np.random.default_rng(0))
    assert batch.size == 22
    once = made(bodies)[1].flops(replace(batch, source=None))
    output = 2 * head.output.weight.numel() * 2
    assert head.flops(batch) - output == 2 * (once - output)


def test_both_orders_are_spelt_out_for_a_model_that_reads_it(recipe):
    recipe = {**recipe, "model": {"name": "rnn", "width": 8, "chars": 4}}
    batch = collated(made(recipe, "task.symmetric=true")[0], ask("so good", pair="odd"), ask("very", pair="bad"))
    alone = [
        collated(made(recipe)[0], ask(a, pair=b), ask(c, pair=d))
        for a, b, c, d in (("so good", "odd", "very", "bad"), ("odd", "so good", "bad", "very"))
    ]
    for side, expected in zip((batch.tokens, batch.source), alone, strict=True):
        assert torch.equal(side.chars, expected.tokens.chars)
    assert not torch.equal(batch.tokens.chars, batch.source.chars)  # the control


def test_both_orders_are_learnt_answered_and_looked_at(bodies, tmp_path):
    changes = ["task.symmetric=true", "train.steps=60", "train.lr=5e-3", "data.max_length=40"]
    pipeline = weft.train(bodies, changes, tmp_path / "run")
    assert pipeline.evaluate()["accuracy"] == 1
    question = {"text": "so good", "pair": "very good"}
    assert pipeline(question)[0]["label"] == "same"
    names, predicted, batch = pipeline.teacher_forced(question)
    assert " ".join(names) == "<s> so good <|d|> very good </s>"
    assert (predicted, batch.source) == (["same"], None)
    if bodies["model"]["name"] != "cnn":
        assert pipeline.attention(question).views[0].rows == names
    with pytest.raises(DataError, match=r"example 1: pair: required, as every example in training had one"):
        pipeline("so good")
    assert pipeline('{"text": "so good", "pair": "very good"}') == pipeline(question)


@pytest.mark.parametrize("text", ['{"text": "so"}', '{"text": "so", "pair": "bad", "label": "x"}', '{"', "[1]", "{}"])
def test_a_pair_is_given_as_json_and_all_else_is_a_text(bodies, text):
    task, _ = made(bodies)
    assert task.parse_text(text, "example 1") == {"text": text}
    assert task.parse_text(' {"pair": "bad", "text": "so"}', "example 1") == {"text": "so", "pair": "bad"}


# GPT's layout (Radford et al. 2018, section 3.3 and figure 1).


@torch.no_grad()
@pytest.mark.parametrize(("pair", "read"), [(None, "<s> so good </s>"), ("bad", "<s> so good <|d|> bad </s>")])
def test_a_gpt_reads_start_delimiter_extract_and_is_asked_at_the_last(bodies, pair, read):
    task, head = made({**bodies, "model": {"name": "gpt", "width": 16, "heads": 2, "layers": 1, "max_positions": 32}})
    batch = collated(task, ask("so good", pair=pair))
    assert " ".join(map(task.tokenizer.token, batch.tokens.ids.tolist())) == read
    extract = head.eval().body.encode(batch.tokens)[0][-1]
    ((_, probabilities),) = head.predict(batch, task.options())
    torch.testing.assert_close(torch.tensor(probabilities), head.output(extract).double().softmax(-1))


def test_a_text_that_is_longer_than_what_a_model_reads_is_refused_before_training(bodies, tmp_path):
    if bodies["model"]["name"] == "cnn":
        bodies = {**bodies, "model": {"name": "gpt", "width": 16, "heads": 2, "layers": 1}}
    with pytest.raises(
        DataError, match="has 7 tokens.* learns 6 positions; set data.max_length to 3 and data.truncation"
    ):
        weft.train(bodies, ["model.max_positions=6"], tmp_path / "run")
    weft.train(
        bodies, ["model.max_positions=6", "data.max_length=3", "data.truncation=cut", "train.steps=1"], tmp_path / "cut"
    )


@pytest.mark.parametrize("kind", [SingleLabel(), MultiLabel()])
def test_an_answer_has_the_scores_of_the_most_probable_labels(kind):
    labels = Labels(f"{number:04d}" for number in range(2000))
    logits = torch.linspace(-5, 5, 2000)[None]
    answer = kind.answer(kind.outputs(logits, kind_options(kind))[0], labels)
    assert list(answer["scores"])[:2] == ["1999", "1998"]
    assert list(answer["scores"].values()) == sorted(answer["scores"].values(), reverse=True)
    predicted = kind.names(answer)
    assert predicted[0] == "1999"
    assert len(predicted) == (1 if type(kind) is SingleLabel else 1000)
    assert len(answer["scores"]) == MAX_SCORES


def kind_options(kind):
    return Threshold() if isinstance(kind, MultiLabel) else Section()


def test_a_batch_of_very_many_labels_is_small(recipe):
    task, head = made(recipe)
    assert head.logits_per_item(task.options()) == len(task.labels) == 3


@pytest.mark.parametrize("kind", [SingleLabel(), MultiLabel(), Regression()])
def test_each_kind_of_target_has_a_distance_from_a_teacher_that_is_nothing_where_they_agree(kind):
    logits, teacher = torch.randn(4, 3), torch.randn(4, 3)
    assert kind.soft_loss(teacher, teacher, 2.0).item() == pytest.approx(0, abs=1e-6)
    assert kind.soft_loss(logits, teacher, 2.0).item() > 0.01
    numbers = F.mse_loss(logits[:, 0], teacher[:, 0], reduction="sum")
    assert (kind.soft_loss(logits, teacher, 2.0) == numbers) == (type(kind) is Regression)


def test_concat_pooling_reads_the_last_state_the_largest_and_the_mean(recipe):
    task, head = made(recipe, "task.pooling=concat", "model={name: rnn, width: 6, direction: both}")
    head.eval()
    batch = collated(task, ask("so good"), ask("fine"))
    pooled = head.pooled_output(batch.tokens)
    for row, states in zip(pooled, batch.tokens.split(head.body.encode(batch.tokens)[0]), strict=True):
        last = torch.cat([states[-1, :3], states[0, 3:]])  # each direction's
        torch.testing.assert_close(row, torch.cat([last, states.amax(0), states.mean(0)]))
    assert head.output.in_features == 18
