"""A trained model as its user meets it: asked, streamed, scored, looked into, saved, loaded."""

import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

import weft
from tests.conftest import reversed_pairs
from weft.config.run import Run
from weft.errors import ConfigError, DataError
from weft.pipeline import run_name
from weft.tasks.prepare import data_for

PAIRS = reversed_pairs()
WORDS = [word for word, _ in PAIRS]
TARGETS = [target for _, target in PAIRS]


def texts(answers):
    return [answer["text"] for answer in answers]


def test_it_has_learnt_to_reverse(reverser):
    assert texts(reverser(WORDS)) == TARGETS


def test_an_example_is_a_text_a_mapping_or_the_tasks_own(reverser):
    word = WORDS[0]
    own = reverser.task.Example(text=word)
    for asked in (word, {"text": word}, own, [word], [{"text": word}], [own], (one for one in [word])):
        answers = reverser(asked)
        assert texts(answers) == [word[::-1]]
        assert set(answers[0]) == {"text", "score"}
    assert reverser([]) == []


def test_predict_is_the_name_of_a_call(reverser):
    options = {"beam": 2, "num_return_sequences": 2}
    assert reverser.predict(WORDS[:3], options) == reverser(WORDS[:3], options)
    assert reverser.predict(WORDS[0]) == reverser.predict([WORDS[0]]) == reverser([(WORDS[0],)])
    assert list(reverser.answers(WORDS[0])) == reverser(WORDS[0])


def test_the_docstring_shows_every_method(reverser):
    methods = {name for name in vars(weft.Pipeline) if not name.startswith("_")} - set(reverser.__dataclass_fields__)
    shown = set(re.findall(r"pipeline\.(\w+)|`(\w+)`", weft.Pipeline.__doc__))
    assert methods <= {name for pair in shown for name in pair}
    assert {"predict", "embed", "save"} <= methods


@pytest.fixture(scope="module")
def pair_recipe(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pairs")
    rows = [("same", "aa", "aa"), ("other", "aa", "bb"), ("same", "b", "b"), ("other", "b", "a")]
    (folder / "train.tsv").write_text("".join("\t".join(row) + "\n" for row in rows))
    return {
        "task": {"name": "classify", "pairs": False},  # a single text is allowed, too
        "data": {"train": str(folder / "train.tsv"), "columns": {"label": 0, "text": 1, "pair": 2}},
        "tokenizer": {"name": "characters"},
        "model": {"name": "rnn", "width": 8},
        "train": {"steps": 3, "device": "cpu"},
    }


@pytest.fixture(scope="module")
def pair_classifier(pair_recipe, tmp_path_factory):
    return weft.train(pair_recipe, out=tmp_path_factory.mktemp("pair_run") / "run")


def test_a_pair_is_a_tuple(pair_classifier):
    by_name = pair_classifier({"text": "aa", "pair": "bb"})
    for asked in ([("aa", "bb")], ("aa", "bb"), [["aa", "bb"]]):
        assert pair_classifier(asked) == by_name
    assert len(pair_classifier([("aa", "bb"), ("b", "b"), "a"])) == 3
    assert pair_classifier(["aa", "bb"]) == pair_classifier("aa") + pair_classifier("bb") != by_name
    with pytest.raises(
        weft.DataError, match=r"example 2: a tuple holds text, pair, but got 3 values: \('a', 'b', 'c'\)"
    ):
        pair_classifier([("aa", "bb"), ("a", "b", "c")])


def test_to_a_task_without_pairs_a_tuple_is_several_texts(reverser):
    assert reverser(tuple(WORDS[:2])) == reverser(WORDS[:2])
    with pytest.raises(weft.DataError, match="example 1: a tuple holds text, but got 2 values"):
        reverser([("ab", "ba")])


def test_a_dataframe_gives_a_dataframe(reverser, pair_classifier):
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"text": WORDS[:3], "year": [1, 2, 3]}, index=["x", "y", "z"])
    found = reverser.predict(frame)
    assert isinstance(found, pandas.DataFrame)
    assert list(found.index) == ["x", "y", "z"]
    assert list(found.columns) == ["text", "score"]
    assert found.to_dict("records") == reverser(WORDS[:3])
    assert list(reverser.answers(frame)) == reverser(frame["text"]) == reverser(WORDS[:3])
    pairs = pandas.DataFrame({"pair": ["bb", None], "text": ["aa", "a"], "label": ["same", "no label of it"]})
    assert pair_classifier(pairs).to_dict("records") == pair_classifier([("aa", "bb"), "a"])
    assert len(reverser(frame[:0])) == 0


def test_a_dataframe_is_evaluated_on(reverser):
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"text": WORDS, "target": TARGETS})
    assert reverser.evaluate(frame) == pytest.approx(reverser.evaluate())
    with pytest.raises(weft.DataError, match="example 1: target: required"):
        reverser.evaluate(frame[["text"]])


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        (["texts"], "the column 'texts' is no field; did you mean 'text'"),
        (["text", "pairs"], "the column 'pairs' is no field; did you mean 'pair'"),
        (["sentence"], "its columns are 'sentence', but an example has the fields text, pair; rename them"),
        ([], "its columns are none, but"),
    ],
)
def test_columns_that_are_no_fields_are_named(pair_classifier, columns, said):
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({column: ["a", "b"] for column in columns})
    with pytest.raises(weft.DataError, match=said):
        pair_classifier(frame)


def test_a_dataframe_is_no_list_of_texts(pair_classifier):
    pandas = pytest.importorskip("pandas")
    with pytest.raises(weft.DataError, match="embed: takes texts, but got a DataFrame; give one of its columns"):
        pair_classifier.embed(pandas.DataFrame({"text": WORDS}))


def test_torch_is_imported_on_first_use_and_pandas_not_at_all():
    code = "import sys, weft; assert 'torch' not in sys.modules; assert 'vectors' in dir(weft); weft.vectors.load"
    code += "; weft.Pipeline; sys.exit('pandas' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=120).returncode == 0


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ([WORDS[0], {"txt": "a"}], r"example 2: text: Field required.*an example has the fields text, target"),
        ([{"text": "a", "txt": "b"}], r"example 1: txt: Extra inputs are not permitted, but is 'b' instead"),
        ([{"text": 3}], r"example 1: text: Input should be a valid string, but is 3 instead"),
        ([7], r"example 1: example: .*but is 7 instead"),
        ([None], r"example 1: example: .*but is None instead"),
        (["a" * 2000], r"example 1: got 2,000 tokens, data.max_length is 1,024"),
        ([*WORDS[:3], "b" * 2000, "c" * 3000], r"example 4: got 2,000 tokens"),
    ],
)
def test_a_wrong_example_is_named_with_the_remedy(reverser, asked, said):
    with pytest.raises(weft.DataError, match=said):
        reverser(asked)


def test_options_of_a_call(reverser):
    answer = reverser(WORDS[0], {"beam": 4, "num_return_sequences": 3})[0]
    assert len(answer["candidates"]) == 3
    assert answer["text"] == answer["candidates"][0]["text"] == TARGETS[0]
    scores = [one["score"] for one in answer["candidates"]]
    assert scores == sorted(scores, reverse=True)
    assert texts(reverser(WORDS[:2], {"max_length": 2})) == [target[:2] for target in TARGETS[:2]]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"beem": 2}, "options.beem: unknown key; did you mean 'beam'"),
        ({"beam": 0}, "options.beam: should be greater than or equal to 1, but is 0 instead"),
        ({"num_return_sequences": 3}, "options: num_return_sequences must be at most beam.*try beam: 3"),
        ({"sample": True, "beam": 2}, "options: sample draws and beam searches"),
    ],
)
def test_wrong_options_are_named(reverser, options, said):
    for ask in (reverser, lambda *asked: list(reverser.stream(*asked))):
        with pytest.raises(weft.ConfigError, match=said):
            ask(WORDS[0], options)


def test_samples_hang_on_the_seed_and_the_place_alone(reverser):
    hot = {"sample": True, "temperature": 3.0, "seed": 5}
    whole = texts(reverser(WORDS, hot))
    assert whole == texts(reverser(WORDS, hot))
    assert whole == texts([*reverser.answers(WORDS[:7], hot), *reverser.answers(WORDS[7:], hot, start=7)])
    assert whole != texts(reverser(WORDS, {**hot, "seed": 6}))
    assert texts(reverser([WORDS[0]] * 20, hot)) != [whole[0]] * 20


def test_the_recipes_options_are_the_default(recipe, tmp_path):
    recipe["task"]["decode"] = {"beam": 2, "num_return_sequences": 2, "max_length": 4}
    pipeline = weft.train(recipe, ["train.steps=1"], tmp_path / "run")
    assert len(pipeline("abc")[0]["candidates"]) == 2
    assert "candidates" not in pipeline("abc", {"num_return_sequences": 1})[0]


def test_the_pieces_of_a_stream_join_to_the_answer(reverser):
    for word in WORDS[:20]:
        pieces = list(reverser.stream(word))
        assert "".join(pieces) == reverser(word)[0]["text"]
        assert len(pieces) == 5
    hot = {"sample": True, "temperature": 2.0}
    assert "".join(reverser.stream(WORDS[0], hot)) == reverser(WORDS[0], hot)[0]["text"]


def test_a_stream_leaves_the_callers_torch_as_it_is(reverser):
    pieces = reverser.stream(WORDS[0])
    next(pieces)
    assert torch.is_grad_enabled()
    assert not torch.is_inference_mode_enabled()
    leaf = torch.ones(2, requires_grad=True)
    leaf.sum().backward()


def test_a_beam_cannot_be_streamed(reverser):
    with pytest.raises(weft.ConfigError, match="a stream is one sequence with beam: 1"):
        list(reverser.stream(WORDS[0], {"beam": 2}))


def test_evaluate_on_a_file_a_list_and_the_recipes_own(reverser, tmp_path, trained_run):
    own = reverser.evaluate()
    assert set(own) == {"loss", "exact_match", "bleu"}
    assert own["exact_match"] == 1
    asked = [{"text": text, "target": target} for text, target in PAIRS]
    assert reverser.evaluate(asked) == pytest.approx(own)
    assert reverser.evaluate(trained_run.parent / "pairs.tsv") == pytest.approx(own)
    rows = "".join(json.dumps({"text": text, "target": text}) + "\n" for text in WORDS)
    (tmp_path / "wrong.jsonl").write_text(rows)
    wrong = reverser.evaluate(str(tmp_path / "wrong.jsonl"))
    assert wrong["exact_match"] < 0.1
    assert wrong["loss"] > 1 > own["loss"]


def test_evaluate_on_a_sample(reverser, monkeypatch):
    from weft.data.samples import datasets as samples

    rows = [("test", {"text": text, "target": target}) for text, target in PAIRS]
    rows += [("valid", {"text": text, "target": text}) for text in WORDS]
    monkeypatch.setitem(samples.SAMPLES, "words", samples.Sample("words", "", "translate", ("text",), lambda: rows))
    assert reverser.evaluate("words")["exact_match"] == 1
    assert reverser.evaluate("words:test")["exact_match"] == 1
    assert reverser.evaluate("words:valid")["exact_match"] < 0.1
    with pytest.raises(weft.DataError, match="words has no split 'vaild'; did you mean 'valid'"):
        reverser.evaluate("words:vaild")


@pytest.mark.parametrize(
    ("data", "error", "said"),
    [
        ("gone.tsv", weft.DataError, "gone.tsv: there is no such file"),
        ("langid", weft.DataError, "a row of langid has text, label, but the task 'translate' reads text, target"),
        ([], weft.DataError, "not one example is left to evaluate on"),
        ([{"text": "a", "target": "b"}, "c"], weft.DataError, "example 2: target: required to train or evaluate"),
        ([{"text": "a", "target": "b" * 2000}], weft.DataError, "example 1: got 2,000 tokens"),
    ],
)
def test_what_cannot_be_evaluated_on_is_named(reverser, data, error, said):
    with pytest.raises(error, match=said):
        reverser.evaluate(data)


def test_a_too_long_row_of_a_file_is_named_by_its_line(reverser, tmp_path):
    (tmp_path / "long.tsv").write_text("a\tb\n" + "a" * 2000 + "\tb\n")
    with pytest.raises(weft.DataError, match=r"long.tsv:2: got 2,000 tokens"):
        reverser.evaluate(tmp_path / "long.tsv")


def test_which_data_are_the_recipes_own(recipe):
    data = weft.pipeline.Run.parse(recipe).data
    assert data_for(data, None)[1] == "valid"
    assert data_for(data.model_copy(update={"test": "t.tsv"}), None)[1] == "test"
    assert data_for(data.model_copy(update={"sample": "dates"}), None)[1] == "test"


def test_attention_is_a_distribution_over_the_source(reverser):
    for word, target in PAIRS[:5]:
        found = reverser.attention(word)
        assert found.source == [*word, "</s>"]
        assert found.target == [*target, "</s>"]
        assert found.weights.shape == (6, 6)
        assert (found.weights >= 0).all()
        np.testing.assert_allclose(found.weights.sum(1), 1, rtol=1e-5)
        assert found.place == "cross, layer 0"


def test_a_fixed_vector_has_no_attention_to_show(recipe, tmp_path):
    pipeline = weft.train(recipe, ["train.steps=1", "model.attention=none"], tmp_path / "run")
    with pytest.raises(weft.RoleError, match="'seq2seq', as configured, has no attention to look at"):
        pipeline.attention("abc")


def test_saving_and_loading_gives_the_same_answers(reverser, tmp_path):
    folder = reverser.save(tmp_path / "deep" / "copy")
    again = weft.load(folder)
    assert again(WORDS) == reverser(WORDS)
    assert again.run == reverser.run
    assert not again.head.training
    with pytest.raises(weft.CheckpointError, match="copy: exists already; choose a new folder"):
        reverser.save(folder)


@pytest.mark.parametrize(("storage", "share"), [("bf16", 0.5), ("int8", 0.25)])
def test_compact_weights_take_less_room_and_answer_alike(reverser, tmp_path, storage, share):
    sizes = [(reverser.save(tmp_path / name, name) / "model.safetensors").stat().st_size for name in ("fp32", storage)]
    assert sizes[1] < (share + 0.1) * sizes[0]
    assert texts(weft.load(tmp_path / storage)(WORDS)) == TARGETS


def test_an_unknown_storage_is_refused(reverser, tmp_path):
    with pytest.raises(ConfigError, match="storage: must be fp32, bf16, int8, but is 'int4' instead"):
        reverser.save(tmp_path / "x", "int4")


def test_every_part_of_a_run_can_be_loaded(trained_run, reverser):
    for place in (trained_run, trained_run / "best", trained_run / "last", str(trained_run)):
        assert weft.load(place)(WORDS[:3]) == reverser(WORDS[:3])


@pytest.fixture
def copied(reverser, tmp_path):
    return reverser.save(tmp_path / "copied")


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "run.yaml", "manifest.json"])
def test_a_damaged_folder_is_refused(copied, name):
    weft.load(copied)
    content = bytearray((copied / name).read_bytes())
    content[len(content) // 2] ^= 1
    (copied / name).write_bytes(content)
    with pytest.raises(weft.CheckpointError, match=re.escape(str(copied))):
        weft.load(copied)
    (copied / name).unlink()
    with pytest.raises(weft.CheckpointError, match="missing|does not|is a folder|no checkpoint"):
        weft.load(copied)


def test_what_is_no_run_is_refused(tmp_path):
    for place in (tmp_path, tmp_path / "gone"):
        with pytest.raises(weft.CheckpointError, match="looked for a checkpoint"):
            weft.load(place)
    with pytest.raises(weft.ConfigError, match="'gpu' cannot be used here.*try auto or cpu"):
        weft.pipeline.pick_device("gpu")


def test_a_notebook_shows_what_it_is(reverser):
    shown = reverser._repr_html_()
    assert shown.startswith("<table>")
    for value in ("translate", "seq2seq", f"{reverser.parameters:,}", f"{len(reverser.tokenizer)} (characters)", "cpu"):
        assert f"<td>{value}</td>" in shown


def test_parameters_are_counted_once_where_they_are_shared(reverser):
    named = sum(value.numel() for value in reverser.head.state_dict().values())
    assert reverser.parameters == named - reverser.head.body.encoder.embed.weight.numel()  # the decoder's too


def test_a_run_goes_by_its_recipe(tmp_path):
    assert run_name("dates") == "dates"
    assert run_name(tmp_path / "mine.yaml") == "mine"
    assert run_name({"task": {}}) == "run"


def test_train_takes_a_file_a_mapping_or_a_run_and_leaves_it_as_it_was(recipe, recipe_file, tmp_path):
    recipe["task"]["decode"] = {"beam": 1}
    before = json.dumps(recipe)
    mapped = weft.train(recipe, ["train.steps=2", "task.decode.beam=2"], tmp_path / "a")
    assert json.dumps(recipe) == before
    assert mapped.run.task.decode.beam == 2
    weft.train(recipe_file, ["train.steps=2"], tmp_path / "b")
    again = weft.train(mapped.run, out=tmp_path / "c")
    assert again(WORDS[:3]) == mapped(WORDS[:3])


def test_without_validation_data_the_last_model_is_the_best(recipe, tmp_path):
    del recipe["data"]["valid"]
    pipeline = weft.train(recipe, ["train.steps=2"], tmp_path / "run")
    assert not pipeline.has_data
    with pytest.raises(weft.ConfigError, match=r"data.valid: required here, but not given"):
        pipeline.evaluate()
    assert weft.load(tmp_path / "run")(WORDS[:3]) == pipeline(WORDS[:3])


OWN = '''
from weft.models.seq2seq.model import Seq2Seq
from weft.tasks.translate import Translate


class MyModel(Seq2Seq):
    """Twice as sure of all."""

    def step(self, ids, state):
        logits, state = super().step(ids, state)
        return 2 * logits, state


class MyTask(Translate):
    """Scored by the first letter too."""

    def score(self, answers, examples):
        first = sum(a["text"][:1] == e.target[:1] for a, e in zip(answers, examples)) / len(examples)
        return {**super().score(answers, examples), "first_letter": first}
'''


@pytest.fixture
def own_module(tmp_path, monkeypatch):
    (tmp_path / "own_parts.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_parts", raising=False)
    yield "own_parts"
    sys.modules.pop("own_parts", None)


@pytest.mark.parametrize("change", ["model.name=own_parts:MyModel", "task.name=own_parts:MyTask"])
def test_a_users_own_class_trains_and_is_loaded_only_with_trust(recipe, tmp_path, own_module, change):
    pipeline = weft.train(recipe, [change, "train.steps=2"], tmp_path / "run")
    del sys.modules[own_module]
    with pytest.raises(weft.ConfigError, match="code from outside weft.*trust=True"):
        weft.load(tmp_path / "run")
    assert own_module not in sys.modules, "it must not run before it is trusted"
    again = weft.load(tmp_path / "run", trust=True)
    assert again(WORDS[:5]) == pipeline(WORDS[:5])
    assert again.evaluate() == pytest.approx(pipeline.evaluate())
    assert ("first_letter" in again.evaluate()) == ("MyTask" in change)


def test_a_users_own_metric_chooses_the_best(recipe, tmp_path, own_module):
    changes = ["task.name=own_parts:MyTask", "train.metric=first_letter", "train.steps=4", "train.eval_every=2"]
    assert weft.train(recipe, changes, tmp_path / "run").evaluate()["first_letter"] >= 0
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(weft.ConfigError, match="no metric 'first_leter'; did you mean 'first_letter'"):
        weft.train(recipe, [*changes, "train.metric=first_leter"], tmp_path / "run")


def test_a_streamed_sample_is_the_one_that_its_place_in_a_list_gets(reverser):
    options = {"sample": True, "temperature": 3.0, "seed": 5}
    whole = [answer["text"] for answer in reverser(["abcde"] * 4, options)]
    streamed = ["".join(reverser.stream("abcde", options, number)) for number in range(4)]
    assert streamed == whole
    assert len(set(whole)) > 1


def test_what_an_evaluation_skips_is_told(reverser, tmp_path):
    path = tmp_path / "rows.tsv"
    path.write_bytes(b"abcde\tedcba\n\xe9\tx\nfedcb\tbcdef\n")
    data = reverser.run.data.model_copy(update={"on_bad_rows": "skip"})
    lenient = replace(reverser, run=reverser.run.model_copy(update={"data": data}))
    told = []
    lenient.evaluate(path, told.append)
    assert len(told) == 1
    assert "skipped 1 row" in told[0]


def test_overrides_reach_a_run_that_is_given(recipe, tmp_path):
    assert weft.train(Run.parse(recipe), ["train.steps=1"], tmp_path / "run").run.train.steps == 1


@pytest.mark.parametrize("overrides", [{"train.steps": 1}, {"train": {"steps": 1}}, "train.steps=1"])
def test_overrides_are_a_mapping_too(recipe, tmp_path, overrides):
    assert weft.train(recipe, overrides, tmp_path / "run").run.train.steps == 1
    limited = weft.load(tmp_path / "run", overrides={"task.decode": {"max_length": 2}})
    assert limited.run.task.decode.max_length == 2
    with pytest.raises(weft.CheckpointError, match="was trained with model.width=.*leave that override out"):
        weft.load(tmp_path / "run", overrides={"model": {"width": 6}})


@pytest.fixture(scope="module")
def transformer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("transformer")
    (folder / "train.jsonl").write_text('{"text": "ab", "target": "ba"}\n')
    recipe = {
        "task": {"name": "translate", "decode": {"max_length": 4}},
        "data": {"train": str(folder / "train.jsonl")},
        "tokenizer": {"name": "characters"},
        "model": {"name": "transformer", "width": 8, "heads": 2, "layers": 1, "ffn_width": 8},
        "train": {"steps": 1, "device": "cpu"},
    }
    weft.train(recipe, out=folder / "run")
    return folder / "run"


def test_rounded_weights_count_as_before_and_have_no_gradients(transformer):
    whole, rounded = (weft.load(transformer, "cpu", precision=bits) for bits in ("fp32", "int8"))
    assert rounded.parameters == whole.parameters > 0
    assert whole.gradients("ab")
    with pytest.raises(weft.ConfigError, match="precision: int8 is for answers and has no gradients"):
        rounded.gradients("ab")


def test_heads_that_were_cut_out_are_not_mistaken_for_others(transformer, tmp_path):
    pruned = weft.load(transformer, "cpu", overrides=["model.pruned_heads={cross.0: [1]}"])
    pruned.save(tmp_path / "pruned")
    for other in ("{cross.0: [0]}", "{}"):
        with pytest.raises(weft.CheckpointError, match=r"the heads \[1\] of cross.0 were pruned from its weights"):
            weft.load(tmp_path / "pruned", "cpu", overrides=[f"model.pruned_heads={other}"])
    fewer = weft.load(tmp_path / "pruned", "cpu", overrides=["model.pruned_heads={cross.0: [1], encoder.0: [0]}"])
    assert fewer.parameters < weft.load(tmp_path / "pruned", "cpu").parameters == pruned.parameters


@pytest.mark.parametrize(
    "change", ["model.activation=gelu", "model.heads=4", "model.width=16", "tokenizer.lowercase=true"]
)
def test_weights_are_not_read_as_another_models(transformer, change):
    key = change.partition("=")[0]
    with pytest.raises(weft.CheckpointError, match=f"was trained with {key}=.*leave that override out"):
        weft.load(transformer, "cpu", overrides=[change])


def test_what_leaves_the_weights_alone_may_change(transformer):
    changed = weft.load(transformer, "cpu", overrides=["task.decode.beam=3", "model.dropout=0.3"])
    assert changed.run.task.decode.beam == 3


def test_errors_are_returned_in_their_places_on_demand(reverser):
    asked = [WORDS[0], {"txt": "abc"}, DataError("in.csv:4: bad"), "a" * 2000, WORDS[1]]
    answers = list(reverser.answers(asked, start=10, on_error="return"))
    assert [answer.get("text") for answer in answers] == [WORDS[0][::-1], None, None, None, WORDS[1][::-1]]
    errors = [answer["error"] for answer in answers[1:4]]
    assert errors[0].startswith("example 12: text: Field required")
    assert errors[1] == "in.csv:4: bad"
    assert errors[2].startswith("example 14: got 2,000 tokens")
    with pytest.raises(DataError, match="example 12: text: Field required"):  # the control: they are raised by default
        list(reverser.answers(asked, start=10))
    with pytest.raises(ConfigError, match="on_error: must be 'raise' or 'return', but is 'skip'"):
        reverser.answers(asked, on_error="skip")


def test_a_bad_example_changes_no_sample_of_the_others(reverser):
    hot = {"sample": True, "temperature": 3.0}
    whole = list(reverser.answers(WORDS[:20], hot))
    broken = list(reverser.answers([*WORDS[:3], "a" * 2000, *WORDS[4:20]], hot, on_error="return"))
    assert "error" in broken[3]
    assert [answer["text"] for answer in broken[:3] + broken[4:]] == [one["text"] for one in whole[:3] + whole[4:]]


def test_a_question_that_is_too_long_is_treated_as_the_recipe_says(reverser):
    run = reverser.run.model_copy(update={"data": reverser.run.data.model_copy(update={"max_length": 5})})
    for policy, cut in (("cut", True), ("drop", False), ("error", False)):
        own = run.model_copy(update={"data": run.data.model_copy(update={"truncation": policy})})
        pipeline = replace(reverser, run=own)
        if cut:
            assert pipeline("abcdefgh") == reverser("abcde")
        else:
            with pytest.raises(DataError, match="example 1: got 8 tokens, data.max_length is 5; shorten it, or set"):
                pipeline("abcdefgh")
        limit = pipeline.truncation_policy("cut")
        assert list(pipeline.answers(["abcdefgh", "ab"], limit=limit)) == reverser(["abcde", "ab"])
        assert str(limit) == "cut 1 sequence longer than data.max_length=5"
