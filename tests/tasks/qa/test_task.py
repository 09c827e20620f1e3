"""Extractive question answering: windows, losses, and answers that are spans of the passage."""

import json

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.labelling import made
from torch.nn import functional as F

import weft
from weft.config.recipes import read_recipe
from weft.config.run import Run
from weft.config.sections import Data
from weft.data.batching.static_shape import StaticShape
from weft.data.readers.examples import Skipped, read_examples
from weft.data.truncation import TruncationPolicy
from weft.errors import ConfigError, DataError, RoleError
from weft.tasks.batch import IGNORE_INDEX
from weft.tasks.corpus.build import prepare
from weft.tasks.factory import make_task, resolve_run
from weft.tasks.inference import predict
from weft.tasks.prepare import pack_split
from weft.tasks.qa.head import Candidate, SpanOptions, Window, WindowOutput, best_spans, logsumexp
from weft.tasks.qa.task import Span, SpanConfig, SpanExample

quick = settings(
    deadline=None, derandomize=True, max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
LIMIT = TruncationPolicy(1024, "error")
PASSAGE = "Ada wove the cloth in May . Bob sold it in June , and Eve wore it ."
ROWS = [("who wove ?", "Ada"), ("who sold ?", "Bob"), ("who wore ?", "Eve"), ("when wove ?", "in May")]


def ask(question, answer=None, passage=PASSAGE, **rest):
    answers = None if answer is None else [answer] if answer else []
    return SpanExample(question=question, passage=passage, answers=answers, **rest)


@pytest.fixture
def rows(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(ask(*row).model_dump_json(exclude_none=True) + "\n" for row in ROWS))
    return path


@pytest.fixture
def recipe(rows):
    return {
        "task": {"name": "span", "max_question_length": 8, "max_answer_length": 4},
        "data": {"train": str(rows), "valid": str(rows), "truncation": "window"},
        "tokenizer": {"name": "words"},
        "model": {"name": "bert", "width": 16, "heads": 2, "layers": 2, "max_positions": 64, "dropout": 0.0},
        "train": {"steps": 120, "batch_tokens": 256, "lr": 0.003},
    }


def encoded(task, *examples, limit=LIMIT):
    return [item for items in task.encode_batch(examples, task.tokenizer, limit) for item in items]


def collated(task, *examples, limit=LIMIT):
    return task.collate(encoded(task, *examples, limit=limit), np.random.default_rng(0))


def answers(task, head, examples, longest=1024, **options):
    span_options = SpanOptions(**{**task.options().model_dump(), **options})
    return list(predict(task, head, examples, TruncationPolicy(longest, "window"), span_options))


# Examples to batches.


def test_an_item_is_the_question_and_the_passage_between_their_signs(recipe):
    task, _ = made(recipe, "tokenizer.num_separators=2")
    special, (question, passage) = task.tokenizer.specials, task.tokenizer.ids(["who wove ?", PASSAGE])
    ((ids, shape, gold, places),) = encoded(task, ask("who wove ?", "the cloth"))
    assert ids.tolist() == [special.bos, *question, special.eos, special.eos, *passage, special.eos]
    assert shape.tolist() == [6, 18, 0, 18]
    assert (gold.tolist(), places.tolist()) == ([8, 9], [])
    ((_, _, gold, places),) = encoded(task, ask("who wove ?"))
    assert gold.tolist() == []
    assert [PASSAGE[slice(*place)] for place in places.reshape(-1, 2)] == PASSAGE.split()


def test_targets_are_where_the_answer_starts_and_ends_and_the_question_is_closed(recipe):
    task, _ = made(recipe)
    batch = collated(task, ask("who wove ?", "the cloth"), ask("who ?", ""))
    first, second = batch.tokens.split(batch.targets)
    assert first.tolist() == [0, *[IGNORE_INDEX] * 4, 0, 0, 1, 2, *[0] * 14, IGNORE_INDEX]
    assert second.tolist() == [3, *[IGNORE_INDEX] * 3, *[0] * 18, IGNORE_INDEX]
    kinds, _ = batch.tokens.split(batch.tokens.segments)
    assert kinds.tolist() == [0] * 5 + [1] * 19
    assert batch.counts == {"windows": 2}


def test_a_long_passage_is_read_in_windows_and_those_without_the_answer_point_at_bos(recipe):
    task, _ = made(recipe)
    limit = TruncationPolicy(11, "window")
    items = encoded(task, ask("who sold ?", "sold it"), limit=limit)
    assert [(shape.tolist()[1], gold.tolist()) for _, shape, gold, _ in items] == [
        (8, [0, 0]),
        (8, [9, 10]),
        (8, [5, 6]),
        (6, [0, 0]),
    ]
    assert str(limit) == "windowed 1 sequence longer than data.max_length=11"
    text = " ".join(task.tokenizer.token(int(id)) for id in items[1][0])
    assert text == "<s> who sold ? </s> in May . Bob sold it in June </s>"


def test_many_are_encoded_as_one_by_one(recipe):
    task, _ = made(recipe)
    examples = [ask(*row) for row in ROWS] + [ask("who ?"), ask("", ""), ask("who ?", passage="")]
    limit = TruncationPolicy(14, "window")
    alone = [task.encode(example, task.tokenizer, limit) for example in examples]
    for ours, expected in zip(task.encode_batch(examples, task.tokenizer, limit), alone, strict=True):
        assert [[part.tolist() for part in item] for item in ours] == [
            [part.tolist() for part in item] for item in expected
        ]


def test_a_long_one_is_an_error_cut_or_dropped_as_the_recipe_says(recipe):
    task, _ = made(recipe)
    with pytest.raises(
        DataError, match="got 21 tokens, data.max_length is 11; set data.truncation: cut, drop or window"
    ):
        encoded(task, ask("who wove ?"), limit=TruncationPolicy(11, "error"))
    assert encoded(task, ask("who wove ?"), limit=TruncationPolicy(11, "drop")) == []
    ((ids, shape, gold, _),) = encoded(task, ask("who sold ?", "Bob"), limit=TruncationPolicy(11, "cut"))
    assert (len(ids), shape.tolist(), gold.tolist()) == (14, [5, 8, 0, 8], [12, 12])
    ((*_, gold, _),) = encoded(task, ask("who wore ?", "Eve"), limit=TruncationPolicy(11, "cut"))
    assert gold.tolist() == [0, 0]


def test_a_question_that_is_too_long_is_cut_and_counted_or_an_error(recipe):
    task, _ = made(recipe)
    limit = TruncationPolicy(30, "window")
    ((ids, shape, *_),) = encoded(task, ask("who " * 12), limit=limit)
    assert (shape.tolist()[0], len(ids)) == (10, 29)
    assert str(limit) == "cut 1 question to task.max_question_length=8 tokens"
    with pytest.raises(DataError, match="the question has 12 tokens, task.max_question_length is 8; raise it, or"):
        encoded(task, ask("who " * 12))


def test_a_window_must_have_room_for_a_passage(recipe):
    with pytest.raises(
        ConfigError, match=r"data.max_length: 8 tokens, question and passage, leave no room for a passage"
    ):
        made(recipe, "data.max_length=8")


def test_what_tokens_make_of_an_answer_is_counted(recipe):
    task, _ = made(recipe)
    limit = TruncationPolicy(64, "window")
    ((_, _, gold, _),) = encoded(task, ask("who ?", "he cloth in M"), limit=limit)
    assert gold.tolist() == [6, 9]  # the cloth in May
    encoded(task, ask("who ?", "Ada wove the cloth in"), limit=limit)
    assert str(limit).split("; ") == [
        "taught 1 answer with the whole of the tokens at either end",
        "taught 1 answer longer than task.max_answer_length=4 tokens",
    ]


def test_the_first_answer_teaches_from_where_it_starts_or_first_stands(recipe):
    task, _ = made(recipe)
    at = PASSAGE.rindex("it")
    ((*_, gold, _),) = encoded(task, ask("what ?", "it", starts=[at]))
    assert gold.tolist() == [20, 20]
    ((*_, gold, _),) = encoded(task, ask("what ?", " it "))
    assert gold.tolist() == [13, 13]
    with pytest.raises(DataError, match="answers: the passage does not have 'them'"):
        encoded(task, ask("what ?", "them"))
    with pytest.raises(ValueError, match="must have a start an answer, and has 2 for 1"):
        ask("what ?", "it", starts=[1, 2])
    with pytest.raises(ValueError, match="at 0 of the passage stands 'Ad', not 'it'; count from 0"):
        ask("what ?", "it", starts=[0])


def test_answers_may_be_nested_as_datasets_has_them(rows):
    row = {"question": "?", "context": PASSAGE, "answers": {"text": ["Bob"], "answer_start": [PASSAGE.index("Bob")]}}
    rows.write_text(json.dumps(row) + "\n")
    columns = {"question": "question", "passage": "context", "answers": "answers"}
    ((_, example),) = read_examples(str(rows), Data(train="unused", columns=columns), SpanExample, Skipped())
    assert example == ask("?", "Bob", starts=[PASSAGE.index("Bob")])
    rows.write_text(json.dumps({**row, "answers": {"text": ["Bob"]}}) + "\n")
    with pytest.raises(DataError, match=r"rows.jsonl:1: answers: should be a valid list, but is {'text': \['Bob'\]}"):
        list(read_examples(str(rows), Data(train="unused", columns=columns), SpanExample, Skipped()))


@pytest.mark.parametrize("tokenizer", ["words", "characters", "bytes", "bpe", "wordpiece", "unigram"])
@quick
@given(data=st.data())
def test_answers_come_back_from_the_tokens_of_every_tokenizer(recipe, tokenizer, data):
    """The characters of the answer's tokens contain the answer, and equal it where tokens end at spaces."""
    task, _ = _with(recipe, tokenizer)
    pieces = data.draw(
        st.lists(
            st.sampled_from(["Ada", "wove", "the", "Ünïcode", "😀", "it.", "ﬁne", " ", "\n"]), min_size=1, max_size=12
        )
    )
    passage = data.draw(st.sampled_from(["", " "])) + " ".join(pieces)
    words = passage.split()
    if not words:
        return
    first = data.draw(st.integers(0, len(words) - 1))
    start = 0
    for word in words[:first]:
        start = passage.index(word, start) + len(word)
    start = passage.index(words[first], start)
    example = ask("who ?", words[first], passage=passage, starts=[start])
    ((_, shape, gold, _),) = encoded(task, example)
    ((*_, places),) = encoded(task, example.model_copy(update={"answers": None}))
    offsets = places.reshape(-1, 2)[gold[0] - shape[0] : gold[1] - shape[0] + 1] if gold[0] else []
    if len(offsets):  # a tokenizer may have no token for a character
        assert passage[offsets[0][0] : offsets[-1][1]] == words[first]


_made: dict[str, tuple] = {}


def _with(recipe, tokenizer):
    if tokenizer not in _made:
        size = {"bpe": 300, "wordpiece": 60, "unigram": 40}.get(tokenizer)
        _made[tokenizer] = made(recipe, f"tokenizer={{name: {tokenizer}{f', size: {size}' if size else ''}}}")
    return _made[tokenizer]


# The loss.


@pytest.mark.parametrize("layers", ["last", "mix", "[1, 2]"])
@torch.no_grad()
def test_the_loss_is_the_mean_of_both_cross_entropies_over_bos_and_passage(recipe, layers):
    task, head = made(recipe, f"task.layers={layers}")
    batch = collated(task, ask("who wove ?", "the cloth"), ask("who ?", ""), ask("when ?", "in June"))
    head.double().eval()
    sums, carry = head(batch)
    expected = 0
    for scores, targets in zip(
        batch.tokens.split(head.scores(batch.tokens)), batch.tokens.split(batch.targets), strict=True
    ):
        open_ = targets != IGNORE_INDEX
        for side, mark in enumerate((1, 2)):
            label = ((targets[open_] & mark) > 0).nonzero()[0]
            expected = expected + F.cross_entropy(scores[open_, side][None], label) / 2
    assert carry is None
    torch.testing.assert_close(sums["windows"], expected)
    everywhere = sum(
        F.cross_entropy(scores[:, side][None], ((targets != IGNORE_INDEX) & ((targets & mark) > 0)).nonzero()[0]) / 2
        for scores, targets in zip(
            batch.tokens.split(head.scores(batch.tokens)), batch.tokens.split(batch.targets), strict=True
        )
        for side, mark in enumerate((1, 2))
    )
    assert not torch.isclose(sums["windows"], everywhere)


def test_what_fills_a_batch_up_changes_neither_loss_nor_gradient(recipe):
    task, head = made(recipe)
    head.double().eval()
    batch = collated(task, *(ask(*row) for row in ROWS[:3]))
    frame = StaticShape((128,), (32,), 6, 4)
    parameters = list(head.parameters())
    ours = torch.autograd.grad(head(batch.to_static_shape(frame))[0]["windows"], parameters, allow_unused=True)
    expected = torch.autograd.grad(head(batch)[0]["windows"], parameters, allow_unused=True)
    torch.testing.assert_close(head(batch.to_static_shape(frame))[0], head(batch)[0])
    for mine, yours in zip(ours, expected, strict=True):
        torch.testing.assert_close(mine, yours)
    spoilt = batch.to_static_shape(frame)
    spoilt.targets[-2:] = torch.tensor([0, 3])  # padding with targets
    assert not torch.isclose(head(spoilt)[0]["windows"], head(batch)[0]["windows"])


@torch.no_grad()
def test_a_window_alone_answers_as_in_any_batch(recipe):
    task, head = made(recipe)
    head.double().eval()
    examples = [ask(row[0]) for row in ROWS] + [ask("who ?", passage="Bob sold ."), ask("", passage="x")]
    scores = [head.scores(collated(task, example).tokens) for example in examples]
    torch.testing.assert_close(head.scores(collated(task, *examples).tokens), torch.cat(scores))


def test_the_body_loses_its_pooler(recipe):
    _, head = made(recipe)
    assert head.body.pooler is None
    assert dict(head.named_parameters())["output.weight"].shape == (2, 16)


# The best spans.


def ranked(scores, window, longest):
    """All spans of a window, the best first, by trying each."""
    first, (low, high), offsets = window
    spans = []
    for start in range(low, high):
        for stop in range(start, min(start + longest, len(offsets))):
            if offsets[start][0] < offsets[start][1] and offsets[stop][0] < offsets[stop][1]:
                score = scores[first + start][0] + scores[first + stop][1]
                spans.append(Candidate(score, offsets[start][0], offsets[stop][1], first + start, first + stop))
    return sorted(spans, key=lambda span: -span.score)


@quick
@given(st.integers(0, 12), st.integers(1, 6), st.integers(1, 9), st.data())
def test_the_best_spans_are_those_that_trying_all_finds(size, longest, top, data):
    rng = np.random.default_rng(data.draw(st.integers(0, 10**6)))
    low = data.draw(st.integers(0, size))
    high = data.draw(st.integers(low, size))
    blank = rng.random(size) < 0.2
    offsets = np.array([(3 * at, 3 * at + (0 if blank[at] else 2)) for at in range(size)], np.int32).reshape(-1, 2)
    scores = rng.normal(size=(size + 4, 2)) * 5
    window = Window(3, (low, high), offsets)
    output = best_spans(scores, window, longest, SpanOptions(top=top))
    expected = ranked(scores, window, longest)
    assert [span[1:] for span in output.spans] == [tuple(map(int, span[1:])) for span in expected[:top]]
    assert [span.score for span in output.spans] == pytest.approx([span.score for span in expected[:top]])
    assert output.total == pytest.approx(logsumexp([span.score for span in expected]))
    assert output.null == pytest.approx(scores[0].sum())


@pytest.mark.parametrize("tokenizer", ["words", "characters", "bytes", "bpe", "wordpiece", "unigram"])
@quick
@given(passage=st.text(max_size=40), question=st.text(max_size=6), seed=st.integers(0, 99))
def test_offsets_always_slice_the_passage(recipe, tokenizer, passage, question, seed):
    task, head = _with(recipe, tokenizer)
    torch.manual_seed(seed)
    with torch.no_grad():
        head.output.weight.normal_(std=2)
    (answer,) = answers(task, head, [ask(question[:2], passage=passage)], longest=20, top=5)
    for candidate in [answer, *answer["candidates"]]:
        if candidate["start"] is None:
            assert candidate["answer"] == ""
        else:
            assert 0 <= candidate["start"] < candidate["end"] <= len(passage)
            assert (
                candidate["answer"]
                == passage[candidate["start"] : candidate["end"]]
                == candidate["answer"].strip()
                != ""
            )
    places = [(candidate["start"], candidate["end"]) for candidate in answer["candidates"]]
    assert len(set(places)) == len(places)
    assert sum(candidate["score"] for candidate in answer["candidates"]) <= 1 + 1e-5


class Bag(torch.nn.Module):
    """A body without context: the hidden state of a token does not depend on the rest of its window."""

    width = 4

    def __init__(self, vocab):
        super().__init__()
        self.embed = torch.nn.Embedding(vocab, 4)

    def drop_pooler(self):
        pass

    def encode(self, tokens, layers=(-1,)):
        return self.embed(tokens.ids)[None]


@quick
@given(st.lists(st.sampled_from(PASSAGE.split()), min_size=1, max_size=40), st.integers(12, 60), st.integers(0, 99))
def test_windows_answer_as_the_whole_passage_does(recipe, words, longest, seed):
    task, _ = _with(recipe, "words")
    torch.manual_seed(seed)
    head = task.head(Bag(len(task.tokenizer))).double()
    example = ask("who wove ?", passage=" ".join(words))
    (whole,) = answers(task, head, [example], top=4, null_threshold=0.5)
    (windowed,) = answers(task, head, [example], longest=longest, top=4, null_threshold=0.5)
    assert windowed == whole
    if len(words) + 3 > longest:
        assert len(encoded(task, example, limit=TruncationPolicy(longest, "window"))) > 1


def test_windows_that_do_not_overlap_are_caught(recipe, monkeypatch):
    from weft.tasks.qa import task as qa_task
    from weft.tasks.qa.windows import PassageWindow

    task, _ = _with(recipe, "words")
    torch.manual_seed(0)
    head = task.head(Bag(len(task.tokenizer))).double()
    examples = [
        ask("who wove ?", passage=" ".join(np.random.default_rng(n).permutation(PASSAGE.split()))) for n in range(20)
    ]
    apart = lambda size, room, stride, answer: [  # noqa: E731
        PassageWindow(start, min(start + room, size), start, min(start + room, size)) for start in range(0, size, room)
    ]
    monkeypatch.setattr(qa_task, "cut_windows", apart)
    assert answers(task, head, examples) != answers(task, head, examples, longest=9)


# Answers.


def task_of(**config):
    return Span(SpanConfig(name="span", **config))


def window_output(*spans, null=0.0, total=None, **options):
    scores = [score for score, *_ in spans]
    each = [Candidate(score, start, end, 0, 0) for score, start, end in spans]
    return WindowOutput(each, logsumexp(scores) if total is None else total, null, SpanOptions(**options))


def test_an_answer_is_the_best_of_all_windows():
    windows = [window_output((1.0, 0, 3), (0.0, 4, 8)), window_output((2.0, 9, 12), (1.5, 0, 8))]
    answer = task_of().answer(ask("?"), windows)
    assert answer == {"answer": "the", "start": 9, "end": 12, "score": pytest.approx(0.474, abs=1e-3)}
    assert task_of().format_answer({"answer": "two\nlines "}) == "two lines"
    assert task_of().answer(ask("?"), [window_output()]) == {"answer": "", "start": None, "end": None, "score": 0.0}


def test_candidates_are_ranked_and_no_place_comes_twice():
    windows = [window_output((1.0, 0, 3), (0.0, 4, 8), (-1.0, 0, 3), top=3), window_output((2.0, 9, 12), top=3)]
    answer = task_of().answer(ask("?"), windows)
    assert [candidate["answer"] for candidate in answer["candidates"]] == ["the", "Ada", "wove"]
    assert answer["candidates"][0] == {key: answer[key] for key in ("answer", "start", "end", "score")}


@pytest.mark.parametrize(
    ("null", "threshold", "text"), [(2.1, 1.0, ""), (1.9, 1.0, "Ada"), (1.0, 0.0, "Ada"), (9.0, None, "Ada")]
)
def test_no_answer_is_given_where_it_scores_far_enough_above_the_best(null, threshold, text):
    windows = [
        window_output((1.0, 0, 3), null=null, null_threshold=threshold, top=2),
        window_output((0.0, 4, 8), null=null + 5),
    ]
    answer = task_of().answer(ask("?"), windows)
    assert answer["answer"] == text
    if threshold is None:
        assert "null" not in answer
        assert [candidate["answer"] for candidate in answer["candidates"]] == ["Ada", "wove"]
    else:
        assert answer["null"] == pytest.approx(null - 1)  # the least of all windows
        assert answer["best"] == "Ada"
        assert {candidate["answer"] for candidate in answer["candidates"]} == {"", "Ada"}
        total = np.exp(null) + np.exp(1) + np.exp(0)
        assert answer["score"] == pytest.approx(np.exp(1.0 if text else null) / total, abs=1e-5)


def test_scores_are_squads_and_those_of_the_unanswerable_where_there_are_some():
    task = task_of(unanswerable=True)
    examples = [ask("?", "Ada"), ask("?", "Bob sold")]
    predictions = [{"answer": "ada!"}, {"answer": "Bob"}]
    assert task.score(predictions, examples) == pytest.approx({"exact_match": 0.5, "f1": (1 + 2 / 3) / 2})
    predictions = [
        {"answer": "", "null": 0.5, "best": "Ada"},
        {"answer": "Bob", "null": -3.0, "best": "Bob"},
        {"answer": "", "null": 2.0, "best": "Eve"},
        {"answer": "it", "null": -1.0, "best": "it"},
    ]
    metrics = task.score(predictions, [*examples, ask("?", ""), ask("?", "")])
    assert metrics == pytest.approx(
        {
            "exact_match": 1 / 4,
            "f1": (2 / 3 + 1) / 4,
            "answerable_exact_match": 0,
            "answerable_f1": 1 / 3,
            "unanswerable": 1 / 2,
            "best_exact_match": 1 / 2,
            "best_f1": (2 / 3 + 2) / 4,
            "best_threshold": -3.0,
        }
    )
    assert set(metrics) == {*task.metrics, "best_threshold"}
    assert "best_f1" not in task.score([{"answer": ""}], [ask("?", "")])
    assert task.unavailable_metric("best_f1", examples) == "every question has an answer there"
    assert task.unavailable_metric("f1", examples) == task.unavailable_metric("best_f1", [ask("?", "")]) == ""


def test_an_answer_that_is_no_exact_match_is_an_error_with_its_own_f1():
    task = task_of(unanswerable=True)
    examples = [ask("?", "Ada"), ask("?", "Bob sold"), ask("?", ""), ask("?", "")]
    answers = [{"answer": text, "score": 0.5} for text in ("ada!", "Bob", "", "it")]
    right, near, empty, wrong = task.errors(answers, examples)
    assert right is empty is None
    assert (near.gold, near.predicted, near.quality) == (["Bob sold"], "Bob", pytest.approx(2 / 3))
    assert (wrong.gold, wrong.predicted, wrong.score, wrong.details) == ([], "it", 0.5, {"f1": 0.0})
    assert task.score(answers, examples)["exact_match"] == 0.5


def test_whether_there_may_be_no_answer_is_settled_by_the_data_or_the_recipe(recipe, rows):
    def resolved_unanswerable(*overrides):
        run = Run.parse(read_recipe(recipe, overrides))
        return resolve_run(run, make_task(run)).task.unanswerable

    assert resolved_unanswerable() is False
    rows.write_text(rows.read_text() + ask("who ate ?", "").model_dump_json() + "\n")
    assert resolved_unanswerable() is True
    assert resolved_unanswerable("task.unanswerable=false") is False
    assert task_of(unanswerable=True, null_threshold=1.5).options() == SpanOptions(null_threshold=1.5)
    assert task_of(null_threshold=1.5).options() == SpanOptions(null_threshold=None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("task.layers=[]", "task.layers: must be last, mix, or a list of layers"),
        ("task.stride=0", "task.stride: should be greater than or equal to 1"),
        ("train.metric=em", "train.metric: the task has no metric 'em'; known: answerable_exact_match"),
        (
            "train.metric=best_f1",
            "train.metric: best_f1 will not be given for data.valid: every question has an answer",
        ),
    ],
)
def test_a_wrong_recipe_is_refused_with_the_remedy(recipe, tmp_path, change, message):
    with pytest.raises(ConfigError, match=message):
        weft.train(recipe, [change], tmp_path / "run")


def test_a_model_that_does_not_encode_is_refused(recipe):
    with pytest.raises(RoleError, match="task 'span' needs a model that encodes"):
        made({**recipe, "model": {"name": "ngram"}})


# As a whole.


def test_it_learns_answers_and_reads_questions_from_json(recipe, tmp_path):
    pipeline = weft.train(recipe, out=tmp_path / "run")
    assert [answer["answer"] for answer in pipeline([ask(*row) for row in ROWS])] == [expected for _, expected in ROWS]
    metrics = pipeline.evaluate()
    assert (metrics["exact_match"], metrics["f1"]) == (1, 1)
    question = json.dumps({"question": "who sold ?", "passage": PASSAGE})
    assert pipeline(question)[0]["answer"] == "Bob"
    assert len(pipeline(question, {"top": 3})[0]["candidates"]) == 3
    with pytest.raises(DataError, match='example 1: must be JSON, since it has several fields: {"question"'):
        pipeline("who sold ?")
    with pytest.raises(DataError, match="example 1: passage: Field required"):
        pipeline('{"question": "who?"}')
    look = pipeline.attention(ask("who sold ?"))
    assert look.answer["answer"] == "Bob"
    names, chosen, batch = pipeline.teacher_forced(ask("who sold ?"))
    assert (chosen, names[0]) == (["Bob"], "<s>")
    assert batch.targets.max() == 3


def test_it_learns_that_there_is_no_answer(recipe, rows, tmp_path):
    rows.write_text(
        rows.read_text() + "".join(ask(q, "").model_dump_json() + "\n" for q in ("who ate ?", "when ate ?"))
    )
    pipeline = weft.train(recipe, ["train.steps=200"], tmp_path / "run")
    assert pipeline.run.task.unanswerable
    metrics = pipeline.evaluate()
    assert (metrics["f1"], metrics["unanswerable"], metrics["best_f1"]) == (1, 1, 1)
    assert pipeline(ask("who ate ?"))[0]["answer"] == ""
    assert pipeline(ask("who ate ?"), {"null_threshold": 1e6})[0]["answer"] != ""
    assert pipeline(ask("who sold ?"), {"null_threshold": -1e6})[0]["answer"] == ""


def test_a_prepared_corpus_is_the_same_and_tells_what_was_counted(recipe, rows, tmp_path):
    rows.write_text(rows.read_text() + ask("who " * 12, "he cloth").model_dump_json() + "\n")
    recipe = {**recipe, "data": {**recipe["data"], "max_length": 14}}
    made_of = prepare(Run.parse(recipe), tmp_path / "corpus", workers=1).splits["train"]
    assert made_of.notice == (
        "windowed 5 sequences longer than data.max_length=14; cut 1 question to task.max_question_length=8 tokens; "
        "taught 1 answer with the whole of the tokens at either end"
    )
    task, _ = made(recipe)
    packed, notice = pack_split(task_data(recipe), "train", task, task.tokenizer)
    assert (packed.digest, notice) == (made_of.digest, made_of.notice)
    folder = str(tmp_path / "corpus")
    changes = ["train.steps=2", "data.valid=null"]
    ours = weft.train(recipe, [f"data.train={folder}", *changes], tmp_path / "a").head
    expected = weft.train(recipe, changes, tmp_path / "b").head
    assert torch.equal(ours.output.weight, expected.output.weight)


def task_data(recipe):
    return Run.parse(recipe).data


@pytest.mark.parametrize(
    "model",
    [
        {"name": "gpt", "width": 16, "heads": 2, "layers": 1, "max_positions": 64},
        {"name": "rnn", "width": 8, "direction": "both", "chars": 4},
        {"name": "cnn", "width": 12},
    ],
)
def test_any_body_that_encodes_will_do(recipe, tmp_path, model):
    recipe = {**recipe, "model": model}
    pipeline = weft.train(recipe, ["train.steps=3", "data.max_length=16"], tmp_path / "run")
    again = weft.load(tmp_path / "run")
    questions = [ask(row[0]) for row in ROWS]
    assert pipeline(questions) == again(questions)


# Against transformers.


def test_logits_are_those_of_transformers(recipe):
    transformers = pytest.importorskip("transformers")
    from tests.bert_weights import copy_bert, padded, small_config

    task, head = made(recipe, "model.max_positions=32", "model.eps=1e-12")
    head.eval()
    theirs = transformers.BertForQuestionAnswering(small_config(len(task.tokenizer))).eval()
    copy_bert(theirs.bert, head.body)
    with torch.no_grad():
        head.output.weight.copy_(theirs.qa_outputs.weight)
        head.output.bias.copy_(theirs.qa_outputs.bias)
        batch = collated(task, *(ask(*row) for row in ROWS), ask("who ?", "", passage="Bob sold ."))
        ids, segments, mask = padded(batch.tokens)
        answer = theirs(ids, token_type_ids=segments, attention_mask=mask)
        logits = torch.stack([answer.start_logits, answer.end_logits], -1)[mask.bool()]
        torch.testing.assert_close(head.scores(batch.tokens), logits, atol=1e-5, rtol=1e-5)
        other = theirs(ids, attention_mask=mask)
        assert not torch.allclose(head.scores(batch.tokens)[:, 0], other.start_logits[mask.bool()], atol=1e-4)
