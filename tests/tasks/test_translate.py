"""Translation: items, batches, teacher forcing, decoding and answers."""

import numpy as np
import pytest
import torch
from tests.conftest import reversed_pairs

from weft.config.recipes import read_recipe
from weft.config.run import Run
from weft.data.truncation import TruncationPolicy
from weft.decoding.config import DecodingConfig
from weft.decoding.generate import Hypothesis
from weft.errors import ConfigError, DataError
from weft.tasks.factory import build, make_task
from weft.tasks.prepare import fit_tokenizer
from weft.tasks.translate import TranslateExample

LIMIT = TruncationPolicy(1024, "error")


def build_task(recipe, *overrides):
    run = Run.parse(read_recipe(recipe, overrides))
    tokenizer = fit_tokenizer(run.tokenizer, run.data, make_task(run))
    torch.manual_seed(0)
    return build(run, tokenizer)


@pytest.fixture
def task(recipe):
    return build_task(recipe)[0]


def pair(text, target=None):
    return TranslateExample(text=text, target=target)


def collated(task, *pairs):
    return task.collate(
        [task.encode(pair(*example), task.tokenizer, LIMIT)[0] for example in pairs], np.random.default_rng(0)
    )


def test_an_item_is_the_source_with_its_end_and_the_target_with_both_ends(task):
    ((source, target),) = task.encode(pair("abc", "cb"), task.tokenizer, LIMIT)
    special = task.tokenizer.specials
    (abc, cb) = task.tokenizer.ids(["abc", "cb"])
    assert source.tolist() == [*abc, special.eos]
    assert target.tolist() == [special.bos, *cb, special.eos]


def test_a_prefix_says_what_is_asked(recipe):
    asked = build_task(recipe, "task.prefix=2xy")[0]
    ((source, _),) = asked.encode(pair("abc", "cb"), asked.tokenizer, LIMIT)
    assert asked.tokenizer.decode(source.tolist()[:-1]) == "2xy abc"
    assert asked.tokenizer.specials.unk not in source, "the tokenizer was trained with it"
    ((plain, _),) = build_task(recipe)[0].encode(pair("abc", "cb"), asked.tokenizer, LIMIT)
    assert asked.tokenizer.decode(plain.tolist()[:-1]) == "abc"


def test_many_are_encoded_as_one_by_one(task):
    pairs = [pair(*example) for example in [*reversed_pairs(), ("", ""), ("zz", None), ("a b\tc", "ü")]]
    alone = [task.encode(example, task.tokenizer, LIMIT) for example in pairs]
    together = task.encode_batch(pairs, task.tokenizer, LIMIT)
    assert [[[list(ids) for ids in item] for item in items] for items in alone] == [
        [[list(ids) for ids in item] for item in items] for items in together
    ]


def test_a_batch_reads_each_target_token_after_the_true_ones_before_it(task):
    batch = collated(task, ("abc", "cba"), ("de", "ed"))
    special = task.tokenizer.specials
    cba, ed = task.tokenizer.ids(["cba", "ed"])
    assert batch.tokens.ids.tolist() == [special.bos, *cba, special.bos, *ed]
    assert batch.targets.tolist() == [*cba, special.eos, *ed, special.eos]
    assert batch.tokens.lengths.tolist() == [4, 3]
    assert batch.source.lengths.tolist() == [4, 3]
    assert batch.counts == {"tokens": 7}
    assert batch.size == 14


@pytest.mark.parametrize(
    ("policy", "items", "message"),
    [("cut", 1, "cut 2 sequences longer than data.max_length=3"), ("drop", 0, "dropped 2 sequences longer than")],
)
def test_long_sides_are_cut_or_dropped_and_counted(task, policy, items, message):
    limit = TruncationPolicy(3, policy)
    encoded = task.encode(pair("abcdef", "fedcba"), task.tokenizer, limit)
    assert len(encoded) == items
    assert message in str(limit)
    assert all(len(source) == 4 and len(target) == 5 for source, target in encoded)  # with their ends
    assert task.encode(pair("abc", "cba"), task.tokenizer, limit)


def test_a_long_pair_is_an_error_unless_the_recipe_says(task):
    with pytest.raises(DataError, match="got 4 tokens, data.max_length is 3"):
        task.encode(pair("abc", "abcd"), task.tokenizer, TruncationPolicy(3, "error"))


@torch.no_grad()
def test_the_loss_is_the_cross_entropy_of_the_target(recipe):
    task, head = build_task(recipe, "model.dropout=0")
    batch = collated(task, ("abc", "cba"), ("de", "ed"))
    sums, carry = head(batch)
    logits = head.body.logits(batch.tokens, batch.source)
    expected = torch.nn.functional.cross_entropy(logits, batch.targets, reduction="sum")
    assert carry is None
    assert float(sums["tokens"]) == pytest.approx(float(expected), rel=1e-5)


@torch.no_grad()
def test_smoothing_is_for_training_alone(recipe):
    task, smooth = build_task(recipe, "model.dropout=0", "task.label_smoothing=0.3")
    _, plain = build_task(recipe, "model.dropout=0")
    plain.load_state_dict(smooth.state_dict())
    batch = collated(task, ("abc", "cba"))
    assert float(smooth.eval()(batch)[0]["tokens"]) == pytest.approx(float(plain.eval()(batch)[0]["tokens"]))
    assert float(smooth.train()(batch)[0]["tokens"]) != pytest.approx(float(plain.train()(batch)[0]["tokens"]))


def test_what_is_asked_does_not_hang_on_the_target_that_comes_with_it(recipe):
    task, head = build_task(recipe)
    head.eval()
    with torch.inference_mode():
        without_target, with_target = (
            head.predict(collated(task, ("abc", target)), DecodingConfig()) for target in (None, "cba")
        )
    assert without_target == with_target


def test_specials_are_never_written(recipe):
    task, head = build_task(recipe)
    head.eval()
    special = task.tokenizer.specials
    with torch.inference_mode():
        batch = collated(task, *((word, None) for word, _ in reversed_pairs()))
        hypotheses = head.predict(batch, DecodingConfig(sample=True, temperature=5.0, max_length=40))
        head.forbid = ()
        free = head.predict(batch, DecodingConfig(sample=True, temperature=5.0, max_length=40))
    written = {id for row in hypotheses for hypothesis in row for id in hypothesis.ids}
    assert not written & {special.bos, special.unk, special.eos}
    assert {id for row in free for hypothesis in row for id in hypothesis.ids} & {special.bos, special.unk}


def test_an_answer_has_candidates_where_there_are_several(task):
    ids = task.tokenizer.ids(["ab", "ba"])
    hypotheses = [
        Hypothesis(tuple(tokens), -1.0, score, True) for tokens, score in zip(ids, (-0.12345678, -2.0), strict=True)
    ]
    assert task.answer(pair("x"), [hypotheses[:1]]) == {"text": "ab", "score": -0.123457}
    both = task.answer(pair("x"), [hypotheses])
    assert both["candidates"] == [{"text": "ab", "score": -0.123457}, {"text": "ba", "score": -2.0}]


def test_an_answer_is_one_line(task):
    assert task.format_answer({"text": "a b"}) == "a b"
    assert task.format_answer({"text": "a\nb\r\nc\u2028d"}) == "a b c d"
    assert task.format_answer({"text": ""}) == ""


def test_scores_and_what_tables_show(task):
    examples = [pair("ab", "ba"), pair("cd", "dc")]
    scores = task.score([{"text": "ba"}, {"text": "cd"}], examples)
    assert scores == {"exact_match": 0.5, "bleu": 0.0}
    assert task.preview(examples[0]) == ("ab", "ba")
    assert task.preview(pair("ab")) == ("ab", "")


def test_a_text_that_is_not_the_target_is_an_error_with_its_own_bleu(recipe, task):
    answers = [{"text": text, "score": -0.5} for text in ("Ab", "a b c d", "x")]
    examples = [pair("x", target) for target in ("ab", "a b c e", "x")]
    case, near, right = task.errors(answers, examples)
    assert (near.gold, near.predicted, near.score) == ("a b c e", "a b c d", -0.5)
    assert near.quality > case.quality == case.details["bleu"] == 0
    assert right is None
    assert build_task(recipe, "task.lowercase=true")[0].errors(answers[:1], examples[:1]) == [None]


def test_several_translations_are_an_item_each_and_references_of_one_question(task):
    ids = task.tokenizer.ids(["ab", "ba", "b"])
    example = pair("ab", ["ba", "", "b"])  # an empty one, as a table has it, is none
    items = task.encode(example, task.tokenizer, LIMIT)
    assert [item[1][1:-1].tolist() for item in items] == ids[1:]
    assert [item[0][:-1].tolist() for item in items] == [ids[0]] * 2
    assert len(task.encode(task.without_labels(example), task.tokenizer, LIMIT)) == 1
    assert task.texts(example) == (["ab"], ["ba", "b"])
    answers = [{"text": "b", "score": -0.5}, {"text": "x", "score": -0.5}]
    assert task.score(answers, [example, example])["exact_match"] == 0.5
    assert [error and error.gold for error in task.errors(answers, [example, example])] == [None, ["ba", "b"]]
    with pytest.raises(ValueError, match="must have a text, but has none"):
        pair("ab", ["", ""])


def test_a_text_in_parts_is_joined():
    assert pair(["Is it?", "It is."]).text == "Is it? It is."
    with pytest.raises(ValueError, match="valid string"):
        pair(["a", 1])


def test_rows_of_one_text_are_grouped_where_the_recipe_says(recipe, task):
    answers = [{"text": text, "score": -1.0} for text in ("b a", "x", "b a")]
    examples = [pair("ab", "b"), pair("c", "x y"), pair("ab", "B a")]
    assert task.score(answers, examples)["exact_match"] == 0
    grouped = build_task(
        recipe, "task.group_references=true", "task.lowercase=true", "task.metrics=[token_error_rate,exact_match]"
    )[0]
    assert grouped.score(answers, examples) == {"token_error_rate": 1 / 4, "exact_match": 1 / 2}
    assert [error and error.gold for error in grouped.errors(answers, examples)] == [None, "x y", None]


def test_a_recipe_names_its_metrics_and_the_first_selects_the_best_model(recipe):
    task = build_task(recipe, "task.metrics=[token_error_rate,rouge1]")[0]
    assert (task.metrics, task.metric, task.lower_is_better) == (
        ("token_error_rate", "rouge1"),
        "token_error_rate",
        True,
    )
    assert not build_task(recipe, "task.metrics=[token_error_rate,rouge1]", "train.metric=rouge1")[0].lower_is_better
    with pytest.raises(ConfigError, match="no metric 'bleu'"):
        build_task(recipe, "task.metrics=[rouge1]", "train.metric=bleu")
    with pytest.raises(ConfigError, match="rouge3"):
        build_task(recipe, "task.metrics=[rouge3]")


def test_an_output_is_read_again_with_its_end(task):
    ids = task.tokenizer.ids(["ba"])[0]
    items = task.encode(pair("ab"), task.tokenizer, LIMIT)
    source, target, batch = task.teacher_forced(items, [[Hypothesis(tuple(ids), -1.0, -1.0, True)]])
    assert (source, target) == (["a", "b", "</s>"], ["b", "a", "</s>"])
    assert batch.tokens.ids.tolist() == [task.tokenizer.specials.bos, *ids]


PROSE = ["The date: 5 May, don't wait!", "C'était l'été, naïve café ☕ 東京", "It is 12:30 now. Isn't it?"] * 8


@pytest.mark.parametrize(
    "tokenizer",
    [
        "{name: words}",
        "{name: characters}",
        "{name: bytes}",
        "{name: bpe, size: 300}",
        "{name: bpe, size: 90, bytes: false}",
        "{name: wordpiece, size: 120}",
        "{name: unigram, size: 90}",
    ],
)
def test_pieces_join_to_the_answer_for_every_tokenizer(recipe, tmp_path, tokenizer):
    (tmp_path / "prose.tsv").write_text("".join(f"{line}\t{line}\n" for line in PROSE), encoding="utf-8")
    recipe["data"] = {"train": str(tmp_path / "prose.tsv")}
    task, head = build_task(recipe, f"tokenizer={tokenizer}")
    head.eval()
    halves = 0
    for seed in range(12):
        # Untrained weights write anything: half characters, line ends, spaces in a row.
        options = DecodingConfig(sample=True, temperature=2.0, max_length=30, seed=seed)
        with torch.inference_mode():
            batch = task.collate(task.encode(pair("May"), task.tokenizer, LIMIT), np.random.default_rng(0))
            answer = task.answer(pair("May"), head.predict(batch, options))["text"]
        pieces = list(task.stream(head, pair("May"), LIMIT, options))
        assert "".join(pieces) == answer
        assert len(pieces) > 1
        halves += answer.endswith("\N{REPLACEMENT CHARACTER}")
    assert halves or "name: bytes" not in tokenizer, "one of them must end in half a character"
