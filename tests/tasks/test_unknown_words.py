"""Copying: unknown words by numbered tokens, and words that no target of the training data has."""

import numpy as np
import pytest

import weft
from weft.data.truncation import TruncationPolicy
from weft.errors import ConfigError
from weft.tasks.translate import Translate, TranslateConfig, TranslateExample
from weft.tasks.unknown_words import numbered_ids, unknown_words, with_unknown_words
from weft.tokenization.trainable import Words

LIMIT = TruncationPolicy(100, "error")
RARE = [f"r{number}" for number in range(20)]  # in the vocabulary, since they occur, but never in a target


def words(**options):
    config = Words.Config(**{"name": "words", "unknown_slots": 2, "size": 10, **options})
    return Words.train(["a likes b"] * 3, config)


def tokens_of(tokenizer, ids):
    return [tokenizer.engine.id_to_token(id) for id in ids]


@pytest.mark.parametrize("split", ["whitespace", "punctuation"])
def test_the_unknown_words_of_a_source_are_numbered_on_both_sides(split):
    tokenizer = words(split=split)
    source, (target, other) = numbered_ids(tokenizer, "X likes Y Z X a", ["Y X a Z W", ""])
    assert tokens_of(tokenizer, source) == ["<unk:0>", "likes", "<unk:1>", "<unk>", "<unk:0>", "a"]  # two slots
    assert tokens_of(tokenizer, target) == ["<unk:1>", "<unk:0>", "a", "<unk>", "<unk>"]
    assert other == []
    assert unknown_words(tokenizer, "X likes Y Z X a") == ["X", "Y"]
    assert with_unknown_words(tokenizer, tokenizer.decode(target), ["X", "Y"]) == "Y X a <unk> <unk>"
    assert with_unknown_words(tokenizer, "<unk:1> <unk:0>", ["X"]) == "<unk> X"  # a slot that stands for no word


def test_a_text_that_spells_a_slot_does_not_get_its_id(tmp_path):
    for tokenizer in (words(split="whitespace"), words(split="whitespace", zeros=True)):
        tokenizer.save(tmp_path)
        for same in (tokenizer, Words.load(tmp_path, tokenizer.config)):
            assert len(same.unknown_slots) == 2
            ids = {*same.ids(["<unk:0> a"])[0], *same.encode("<unk:0> a").ids}
            assert ids == {same.specials.unk, same.engine.token_to_id("a")}
            assert unknown_words(same, "<unk:1> x") == ["<unk:1>", "x"]


def test_lower_case_is_one_word():
    tokenizer = words(lowercase=True)
    source, (target,) = numbered_ids(tokenizer, "Xa xa", ["XA"])
    assert tokens_of(tokenizer, [*source, *target]) == ["<unk:0>"] * 3
    assert unknown_words(tokenizer, "Xa xa") == ["xa"]


def test_a_vocabulary_has_room_for_its_slots():
    with pytest.raises(ValueError, match="must be at least 24: got 20"):
        words(unknown_slots=20, size=20)
    assert not words(unknown_slots=0).unknown_slots


def test_items_answers_and_increments_have_the_words():
    task = Translate(TranslateConfig(name="translate"))
    task.tokenizer = words()
    example = TranslateExample(text="X likes Y", target=["Y X", "b"])
    first, second = task.encode(example, task.tokenizer, LIMIT)
    slots = list(task.tokenizer.unknown_slots)
    assert first[1][1:-1].tolist() == slots[::-1]
    assert first[0].tolist() == second[0].tolist() == [slots[0], first[0][1], slots[1], task.tokenizer.specials.eos]
    batch = task.collate([first], np.random.default_rng(0))
    assert batch.source.ids.tolist() == first[0].tolist()


def write(path, rows):
    path.write_text("".join(f"{row}\n" for row in rows), encoding="utf-8")
    return str(path)


def swapped(rng, pool, count):
    for _ in range(count):
        (first, second), verb = rng.choice(pool, 2, replace=False), rng.choice(["likes", "sees"])
        yield f"{first} {verb} {second}\t{verb} ( {second} , {first} )"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Return a Transformer that copies and one that does not, and the test files."""
    folder, rng = tmp_path_factory.mktemp("copying"), np.random.default_rng(0)
    rows = [
        *swapped(rng, [f"n{number}" for number in range(200)], 600),
        *(f"{rare} rests\trests" for rare in RARE * 20),
    ]
    train = write(folder / "train.tsv", rng.permutation(rows))
    tests = [
        write(folder / f"{name}.tsv", swapped(rng, pool, 40))
        for name, pool in {"rare": RARE, "new": [f"x{number}" for number in range(40)]}.items()
    ]
    recipe = {
        "task": {"name": "translate", "decode": {"max_length": 12}},
        "data": {"train": train},
        "tokenizer": {"name": "words", "size": 130, "split": "whitespace", "unknown_slots": 4},
        "model": {"name": "transformer", "width": 32, "heads": 2, "layers": 1, "ffn_width": 32, "dropout": 0.0},
        "train": {"steps": 200, "batch_tokens": 256, "lr": 1e-2, "report_every": 100},
    }
    models = [weft.train(recipe, f"model.copying={copying}", folder / copying) for copying in ("true", "false")]
    return *models, *tests


def test_what_no_target_had_is_copied_and_without_copying_it_is_not(runs):
    copying, plain, rare, new = runs
    assert copying.evaluate(rare)["exact_match"] > 0.75
    assert plain.evaluate(rare)["exact_match"] < 0.2
    assert copying.evaluate(new)["exact_match"] > 0.9  # unknown words


def test_all_searches_write_the_words_of_the_text_also_when_loaded_again(runs):
    copying = runs[0]
    text, answer = "Foo likes Bar", "likes ( Bar , Foo )"
    assert "".join(copying.stream(text)) == answer
    assert [copying([text], options)[0]["text"] for options in ({}, {"beam": 3}, {"sample": True, "top_k": 1})] == [
        answer
    ] * 3
    assert copying([text, "r1 sees Foo"])[1]["text"] == "sees ( Foo , r1 )"
    copying.save(folder := copying.run.data.train.replace("train.tsv", "saved"))
    assert weft.load(folder)([text]) == copying([text])
    look = copying.attention(text)
    assert look.source == ["<unk:0>", "likes", "<unk:1>", "</s>"]
    assert look.target == ["likes", "(", "<unk:1>", ",", "<unk:0>", ")", "</s>"]


def test_one_vocabulary_is_needed(tmp_path):
    recipe = {
        "task": {"name": "translate"},
        "data": {"train": write(tmp_path / "train.tsv", ["a b\tb a"])},
        "tokenizer": {"name": "words", "target": {"name": "words"}},
        "model": {"name": "seq2seq", "width": 8, "copying": True},
        "train": {"steps": 1},
    }
    with pytest.raises(ConfigError, match="model.copying: copies tokens of the source, so source and target"):
        weft.train(recipe, (), tmp_path / "run")
