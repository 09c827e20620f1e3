"""Exact match and F1 against SQuAD's evaluation scripts, reproduced here."""

import collections
import re
import string

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from weft.tasks.qa.metrics import best_threshold, mean_scores, normalize, score_answer, word_f1

WORDS = st.sampled_from(
    ["the", "a", "An", "cat", "Cat", "cat's", "dog.", "—", "U.S.", "the-cat", "ein", " ", "\t", "é", ""]
)
TEXT = st.one_of(st.lists(WORDS, max_size=6).map(" ".join), st.text(max_size=12))


# evaluate-v1.1.py


def normalize_answer(s):
    def remove_articles(text):
        return re.sub(r"\b(a|an|the)\b", " ", text)

    def white_space_fix(text):
        return " ".join(text.split())

    def remove_punc(text):
        exclude = set(string.punctuation)
        return "".join(ch for ch in text if ch not in exclude)

    return white_space_fix(remove_articles(remove_punc(s.lower())))


def f1_score(prediction, ground_truth):
    prediction_tokens = normalize_answer(prediction).split()
    ground_truth_tokens = normalize_answer(ground_truth).split()
    common = collections.Counter(prediction_tokens) & collections.Counter(ground_truth_tokens)
    num_same = sum(common.values())
    if num_same == 0:
        return 0
    precision = 1.0 * num_same / len(prediction_tokens)
    recall = 1.0 * num_same / len(ground_truth_tokens)
    return (2 * precision * recall) / (precision + recall)


def evaluate_1(predictions, golds):
    f1 = exact_match = 0
    for prediction, ground_truths in zip(predictions, golds, strict=True):
        exact_match += max(
            normalize_answer(prediction) == normalize_answer(ground_truth) for ground_truth in ground_truths
        )
        f1 += max(f1_score(prediction, ground_truth) for ground_truth in ground_truths)
    return {"exact_match": exact_match / len(golds), "f1": f1 / len(golds)}


# evaluate-v2.0.py


def compute_f1(a_gold, a_pred):
    gold_toks, pred_toks = normalize_answer(a_gold).split(), normalize_answer(a_pred).split()
    common = collections.Counter(gold_toks) & collections.Counter(pred_toks)
    num_same = sum(common.values())
    if len(gold_toks) == 0 or len(pred_toks) == 0:
        return int(gold_toks == pred_toks)
    if num_same == 0:
        return 0
    precision = 1.0 * num_same / len(pred_toks)
    recall = 1.0 * num_same / len(gold_toks)
    return (2 * precision * recall) / (precision + recall)


def get_raw_scores(golds, preds):
    exact_scores, f1_scores = {}, {}
    for qid, answers in enumerate(golds):
        gold_answers = [a for a in answers if normalize_answer(a)]
        if not gold_answers:
            gold_answers = [""]
        a_pred = preds[qid]
        exact_scores[qid] = max(int(normalize_answer(a) == normalize_answer(a_pred)) for a in gold_answers)
        f1_scores[qid] = max(compute_f1(a, a_pred) for a in gold_answers)
    return exact_scores, f1_scores


def find_best_thresh(preds, scores, na_probs, qid_to_has_ans):
    num_no_ans = sum(1 for k in qid_to_has_ans if not qid_to_has_ans[k])
    cur_score = num_no_ans
    best_score = cur_score
    best_thresh = 0.0
    qid_list = sorted(na_probs, key=lambda k: na_probs[k])
    for qid in qid_list:
        if qid not in scores:
            continue
        diff = scores[qid] if qid_to_has_ans[qid] else -1 if preds[qid] else 0
        cur_score += diff
        if cur_score > best_score:
            best_score = cur_score
            best_thresh = na_probs[qid]
    return 100.0 * best_score / len(scores), best_thresh


@given(TEXT)
@example("The U.S.'s an a-b THE\u2003Theatre ﬁn")
def test_texts_are_normalized_as_the_script_does(text):
    assert normalize(text) == normalize_answer(text)


@given(st.lists(st.tuples(TEXT, st.lists(TEXT, min_size=1, max_size=4)), min_size=1, max_size=6))
@example([("the", ["the"])])
@example([("cat", ["a cat", "dogs"]), ("dog", ["a cat"])])
def test_answers_score_as_in_the_first_script(pairs):
    texts, golds = zip(*pairs, strict=True)
    ours = mean_scores([score_answer(*pair, unanswerable=False) for pair in pairs])
    assert ours == pytest.approx(evaluate_1(texts, golds), abs=1e-12)


@given(st.lists(st.tuples(TEXT, st.lists(TEXT, max_size=3)), min_size=1, max_size=6))
@example([("", []), ("the", []), ("cat", []), ("", ["the"]), ("cat", ["the", "cat dog"])])
def test_answers_score_as_in_the_second_script(pairs):
    texts, golds = zip(*pairs, strict=True)
    exact, f1 = get_raw_scores(golds, texts)
    answer_scores = [score_answer(*pair, unanswerable=True) for pair in pairs]
    assert [score.exact for score in answer_scores] == list(exact.values())
    assert [score.f1 for score in answer_scores] == pytest.approx(list(f1.values()), abs=1e-12)


def test_the_two_scripts_differ_where_nothing_is_left_of_an_answer():
    assert score_answer("the", ["a"], False).f1 == 0
    assert score_answer("the", ["a"], True).f1 == 1
    assert (word_f1("a", "the"), word_f1("a", "the", empty=True), word_f1("cat", "the", empty=True)) == (0, 1, 0)


@given(
    st.lists(
        st.tuples(st.booleans(), st.floats(0, 1), st.sampled_from([-2.0, -1.0, 0.0, 0.5, 3.25])), min_size=1, max_size=9
    )
)
def test_the_best_threshold_is_the_scripts(rows):
    answerable, gains, nulls = zip(*rows, strict=True)
    preds = dict.fromkeys(range(len(rows)), "some answer")
    expected, threshold = find_best_thresh(
        preds, dict(enumerate(gains)), dict(enumerate(nulls)), dict(enumerate(answerable))
    )
    ours = best_threshold(gains, nulls, answerable)
    assert ours == (pytest.approx(expected / 100), threshold)


def test_the_best_threshold_answers_what_it_must():
    assert best_threshold([1, 1, 1], [-1.0, 2.0, 0.5], [True, False, True]) == (1.0, 0.5)
    assert best_threshold([0, 0], [-1.0, 2.0], [False, False]) == (1.0, 0.0)  # better never to answer
