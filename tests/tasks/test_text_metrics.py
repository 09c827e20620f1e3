"""Metrics of generated texts against one reference or several."""

from functools import cache

import pytest
import sacrebleu
from hypothesis import example, given
from hypothesis import strategies as st

from weft.tasks.text_metrics import TEXT_METRICS, bleu, common_subsequence, edit_distance, sentence_bleu

# Candidate, references, and the F1 of ROUGE-1, ROUGE-2 and ROUGE-L by rouge_score 0.1.2 (score_multi, no stemmer).
ROUGE = [
    (
        "GPT-2 Ünder_score of the new The We model,",
        [
            "GPT-2 Ünder_score models of the we new state-of-the-art The We propose model,",
            "the GPT-2 state-of-the-art summary we",
        ],
        (0.7407407407, 0.4, 0.7407407407),
    ),
    (
        "we 3.5 learning! The We for GPT-2 GPT-2 learning! GPT-2 for",
        [
            "We GPT-2 the propose Ünder_score models é The The model, propose the summary Ünder_score",
            "new learning! We We model, é GPT-2 é models GPT-2 Ünder_score the The GPT-2",
        ],
        (0.6451612903, 0.2068965517, 0.5161290323),
    ),
    (
        "GPT-2 we BERT's for models models BERT's we We we The",
        [
            "GPT-2 we state-of-the-art BERT's for models models BERT's we We we The",
            "GPT-2 learning! We We the The we for model, summary BERT's the of summary",
            "of BERT's the The 3.5 we we model,",
        ],
        (0.875, 0.8, 0.875),
    ),
    (
        "new we a Ünder_score learning! Ünder_score of for propose We BERT's é new",
        ["state-of-the-art é model, é The é models 3.5 é GPT-2"],
        (0.0769230769, 0.0, 0.0769230769),
    ),
    (
        "é summary Ünder_score state-of-the-art propose Ünder_score",
        [
            "a state-of-the-art GPT-2 3.5",
            "for of We Ünder_score models state-of-the-art We new state-of-the-art é propose We We model,",
            "we The state-of-the-art model, 3.5 we state-of-the-art",
        ],
        (0.4666666667, 0.3571428571, 0.4666666667),
    ),
    ("of GPT-2 GPT-2 we models", ["of GPT-2 GPT-2 we models", "é é"], (1.0, 1.0, 1.0)),
    ("", ["models We BERT's"], (0.0, 0.0, 0.0)),
]


def scores(name, texts, references):
    return TEXT_METRICS[name]([[text] for text in texts], references)


def test_exact_match_asks_for_one_of_the_references():
    assert scores("exact_match", ["a", "b", "c ", "D"], [["x", "a"], ["b"], ["c"], ["d"]]) == 0.5
    assert scores("exact_match", [], []) == 0
    assert TEXT_METRICS["exact_match"]([["a", "b"]], [["b"]]) == 0  # the best candidate alone counts


def test_recall_is_the_share_of_references_among_the_candidates():
    assert TEXT_METRICS["recall"]([["a", "b"], ["c"]], [["b", "x", "a"], ["d"]]) == 0.5


def test_bleu_is_sacrebleus_with_as_many_references_as_there_are():
    texts = ["the cat sat on the mat", "a dog ran over the hill today"]
    first = ["the cat is on the mat", "a dog ran up the hill today"]
    assert scores("bleu", texts, [[target] for target in first]) == pytest.approx(
        sacrebleu.corpus_bleu(texts, [first]).score
    )
    more = ["the cat sat there on a mat", None]  # the second text has one reference
    both = [[first[0], more[0]], first[1:]]
    assert scores("bleu", texts, both) == pytest.approx(sacrebleu.corpus_bleu(texts, [first, more]).score)
    assert scores("bleu", texts, both) > scores("bleu", texts, [[target] for target in first])
    assert scores("bleu", [], []) == 0


def test_bleu_is_the_corpuss_and_no_mean_over_sentences():
    texts, targets = ["a b c d", "e"], [["a b c d"], ["e f g h i j"]]
    mean = (scores("bleu", texts[:1], targets[:1]) + scores("bleu", texts[1:], targets[1:])) / 2
    assert abs(scores("bleu", texts, targets) - mean) > 1


def test_the_bleu_of_a_sentence_is_sacrebleus():
    for text, target in (("a dog ran up", "a dog ran over"), ("dog", "a dog"), ("", "a"), ("a b c d e", "a b c d e")):
        targets = [target, "a dog"]
        assert sentence_bleu(text, targets) == pytest.approx(sacrebleu.sentence_bleu(text, targets).score)
    assert sentence_bleu("dog", ["dog"]) != pytest.approx(scores("bleu", ["dog"], [["dog"]]))  # the control: no n-grams


def test_bleu_may_be_of_shorter_ngrams():
    texts, references = [["the cat sat"], ["a dog"]], [["the cat ran"], ["none", "so"]]
    assert bleu(texts, [["the cat sat"], ["a dog", "none"]], order=2) == pytest.approx(100)
    assert 0 < bleu(texts, references, order=2) < 60
    assert bleu(texts, references, order=2) != pytest.approx(bleu(texts, references))


@pytest.mark.parametrize(("text", "references", "expected"), ROUGE)
def test_rouge_is_that_of_rouge_score(text, references, expected):
    actual = [scores(name, [text], [references]) for name in ("rouge1", "rouge2", "rougeL")]
    assert actual == pytest.approx(expected, abs=1e-9)


def test_the_token_error_rate_is_of_the_nearest_reference():
    assert scores("token_error_rate", ["a b c"], [["a x c", "a b c d"]]) == pytest.approx(1 / 3)  # a tie: the shorter
    assert scores("token_error_rate", ["a b", ""], [["a b"], ["c d"]]) == pytest.approx(2 / 4)  # a sum, not a mean
    assert scores("token_error_rate", ["a b c d"], [["x"]]) == 4


items = st.lists(st.sampled_from("abc"), max_size=9)


@given(items, items)
def test_alignments_are_those_of_the_recursive_definitions(first, second):
    @cache
    def longest(i, j):
        if not (i and j):
            return 0
        same = first[i - 1] == second[j - 1]
        return longest(i - 1, j - 1) + 1 if same else max(longest(i - 1, j), longest(i, j - 1))

    @cache
    def edits(i, j):
        if not (i and j):
            return i + j
        substituted = edits(i - 1, j - 1) + (first[i - 1] != second[j - 1])
        return min(substituted, edits(i - 1, j) + 1, edits(i, j - 1) + 1)

    assert common_subsequence(first, second) == longest(len(first), len(second))
    assert edit_distance(first, second) == edits(len(first), len(second))


@given(st.lists(st.tuples(st.text(max_size=20), st.lists(st.text(max_size=20), min_size=1)), max_size=4))
@example([("", [""])])
def test_they_stay_in_their_range_whatever_the_text(pairs):
    texts, references = [text for text, _ in pairs], [own for _, own in pairs]
    for name in TEXT_METRICS.keys() - {"token_error_rate"}:
        assert 0 <= scores(name, texts, references) <= (100 + 1e-9 if name == "bleu" else 1)
    assert scores("token_error_rate", texts, references) >= 0
