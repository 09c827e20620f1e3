"""sentence-transformers directories: pooling against its equations on transformers' hidden states; and export."""

import json
import shutil

import numpy as np
import pytest
import torch
from tests.bert_folders import make

import weft
from weft.conversion.convert import convert
from weft.errors import CheckpointError
from weft.formats.sentence_transformers import Pooling, export_pooling, read_pooling, transformer_folder

TEXTS = ["The lambda expression", "x", "An assignment, isn't it? " * 4, "Naïve café", ""]
LONGEST = 20
THEIRS = "sentence_transformers.models."
FLAGS = ["cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken"]
POOLS = {"mean_tokens": "mean", "cls_token": "cls", "max_tokens": "max", "lasttoken": "last"}


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    """Return a folder with a bare BERT, and transformers' model and tokenizer; read-only."""
    folder = tmp_path_factory.mktemp("bert") / "it"
    return folder, *make(folder, "bert", "Model")


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content), encoding="utf-8")


def parts(*kinds):
    folders = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
    return [
        {"idx": place, "name": str(place), "path": folders.get(kind, kind), "type": THEIRS + kind}
        for place, kind in enumerate(kinds)
    ]


def sentences(folder, bert, pool="mean_tokens", normalize=True, **settings):
    """Write a sentence-transformers directory."""
    shutil.copytree(bert, folder)
    write(folder / "modules.json", parts("Transformer", "Pooling", *["Normalize"] * normalize))
    write(folder / "1_Pooling" / "config.json", {f"pooling_mode_{flag}": flag == pool for flag in FLAGS})
    write(folder / "sentence_bert_config.json", {"max_seq_length": LONGEST, "do_lower_case": False, **settings})
    return folder


@torch.no_grad()
def pooled(model, tokenizer, pool, normalize):
    """Pool the last layer of each text alone, by the equations."""
    vectors = []
    for text in TEXTS:
        states = model(**tokenizer(text, truncation=True, max_length=LONGEST, return_tensors="pt")).last_hidden_state[0]
        vector = {"mean": states.mean(0), "cls": states[0], "max": states.amax(0), "last": states[-1]}[pool]
        vectors.append((vector / vector.norm() if normalize else vector).numpy())
    return np.stack(vectors)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("theirs", POOLS)
def test_vectors_are_pooled_as_the_folder_says(bert, tmp_path, theirs, normalize):
    folder, model, tokenizer = bert
    pipeline = weft.load(sentences(tmp_path / "st", folder, theirs, normalize), device="cpu")
    assert pipeline.pooling == Pooling(POOLS[theirs], normalize, LONGEST)
    must = pooled(model, tokenizer, POOLS[theirs], normalize)
    np.testing.assert_allclose(pipeline.embed(TEXTS, truncate=True), must, rtol=0, atol=1e-5)
    other = "cls" if theirs != "cls_token" else "mean"
    assert np.abs(pipeline.embed(TEXTS, pool=other, truncate=True) - must).max() > 1e-3  # the negative control


def test_later_versions_say_it_in_other_words(bert, tmp_path):
    folder, model, tokenizer = bert
    model_folder = sentences(tmp_path / "st", folder)
    kinds = {"Transformer": "base.modules.transformer", "Pooling": "sentence_transformer.modules.pooling"}
    modules = [
        {**module, "type": f"sentence_transformers.{kinds[kind]}.{kind}"}
        for kind, module in zip(kinds, parts(*kinds), strict=True)
    ]
    write(model_folder / "modules.json", modules)
    write(model_folder / "1_Pooling" / "config.json", {"embedding_dimension": 24, "pooling_mode": "lasttoken"})
    write(model_folder / "sentence_bert_config.json", {"transformer_task": "feature-extraction"})
    path = model_folder / "tokenizer_config.json"
    config = json.loads(path.read_text()) if path.exists() else {}
    write(path, {**config, "model_max_length": LONGEST})
    pipeline = weft.load(model_folder, device="cpu")
    assert pipeline.pooling == Pooling("last", False, LONGEST)
    must = pooled(model, tokenizer, "last", False)
    np.testing.assert_allclose(pipeline.embed(TEXTS, truncate=True), must, rtol=0, atol=1e-5)


def test_the_transformer_may_be_in_a_folder_of_its_own(bert, tmp_path):
    folder, *_ = bert
    model_folder = sentences(tmp_path / "st", folder)
    inside = model_folder / "0_Transformer"
    inside.mkdir()
    for path in model_folder.iterdir():
        if path.is_file() and path.name != "modules.json":
            shutil.move(path, inside / path.name)
    assert transformer_folder(model_folder) == model_folder
    write(
        model_folder / "modules.json",
        [{**module, "path": module["path"] or "0_Transformer"} for module in parts("Transformer", "Pooling")],
    )
    assert transformer_folder(model_folder) == inside
    pipeline = weft.load(model_folder, device="cpu")
    assert pipeline.pooling == Pooling("mean", False, LONGEST)
    assert pipeline.embed(TEXTS[:2]).shape == (2, 24)
    assert convert(model_folder, tmp_path / "ours").path == tmp_path / "ours"


def test_lower_case_comes_before_all_else(bert, tmp_path):
    pipeline = weft.load(sentences(tmp_path / "st", bert[0], do_lower_case=True), device="cpu")
    assert pipeline.pooling.lowercase
    np.testing.assert_array_equal(pipeline.embed(["THE LAMBDA"]), pipeline.embed(["the lambda"]))


def test_a_folder_that_does_not_say_how_has_no_pooling(bert):
    folder, *_ = bert
    assert read_pooling(folder) is None
    assert transformer_folder(folder) == folder
    assert weft.load(folder, device="cpu").pooling is None


def test_it_goes_into_a_checkpoint_and_back_out(bert, tmp_path):
    model_folder = sentences(tmp_path / "st", bert[0], "cls_token")
    convert(model_folder, tmp_path / "ours").demand()
    convert(tmp_path / "ours", tmp_path / "theirs").demand()
    vectors = [
        weft.load(path, device="cpu").embed(TEXTS, truncate=True)
        for path in (model_folder, tmp_path / "ours", tmp_path / "theirs")
    ]
    for other in vectors[1:]:
        np.testing.assert_allclose(other, vectors[0], rtol=0, atol=1e-6)
    assert read_pooling(tmp_path / "theirs") == read_pooling(tmp_path / "ours") == Pooling("cls", True, LONGEST)
    config = json.loads((tmp_path / "theirs" / "1_Pooling" / "config.json").read_text())
    assert config["word_embedding_dimension"] == 24
    assert [key for key, value in config.items() if value is True] == ["pooling_mode_cls_token"]


@pytest.mark.parametrize("pool", ["mean", "cls"])
def test_a_contrastive_model_is_written_with_the_pooling_that_was_trained(tmp_path, pool):
    rows = tmp_path / "rows.txt"
    rows.write_text("\n".join(filter(None, TEXTS)))
    recipe = {
        "task": {"name": "contrastive", "pool": pool},
        "data": {"train": str(rows), "max_length": LONGEST - 2, "truncation": "cut"},
        "tokenizer": {"name": "wordpiece", "size": 120},
        "model": {"name": "bert", "width": 24, "heads": 2, "layers": 2, "max_positions": 60},
        "train": {"steps": 2, "batch_size": 4, "device": "cpu"},
    }
    vectors = weft.train(recipe, out=tmp_path / "run").embed(TEXTS, truncate=True)
    convert(tmp_path / "run", tmp_path / "theirs").demand()
    assert read_pooling(tmp_path / "theirs") == Pooling(pool, True, LONGEST)
    written = weft.load(tmp_path / "theirs", device="cpu")
    np.testing.assert_allclose(written.embed(TEXTS, truncate=True), vectors, rtol=0, atol=1e-6)
    assert written.run.task.name == "embed"


@pytest.mark.parametrize("pooling", [Pooling("mean"), Pooling("last", True, 7, True), Pooling("max", False, 3)])
def test_what_is_written_is_read_again(tmp_path, pooling):
    export_pooling(tmp_path, pooling, 8)
    assert read_pooling(tmp_path) == pooling


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("modules.json", parts("Transformer", "Pooling", "Dense"), "has a part 'Dense', which weft does not do"),
        ("modules.json", parts("Pooling", "Transformer"), "must have the parts Transformer, Pooling and perhaps"),
        ("modules.json", parts("Transformer"), "must have the parts"),
        ("modules.json", [{"path": ".."}], "must be a list of parts"),
        ("modules.json", {"a": 1}, "must be a list of parts"),
        ("modules.json", [{**one, "path": "../x"} for one in parts("Transformer", "Pooling")], "not inside this one"),
        ("1_Pooling/config.json", {"pooling_mode": ["cls", "mean"]}, "pools by cls and mean, which weft does not do"),
        ("1_Pooling/config.json", {"pooling_mode_weightedmean_tokens": True}, "pools by weightedmean"),
        ("sentence_bert_config.json", {"max_seq_length": "x"}, "max_seq_length must be a number of tokens, but is 'x'"),
        ("sentence_bert_config.json", {"transformer_task": "fill-mask"}, "transformer_task is 'fill-mask'"),
        ("config_sentence_transformers.json", {"default_prompt_name": "query"}, "puts the prompt 'query' before every"),
        ("pooling.json", {"pool": "median"}, "pooling.json: pool: "),
    ],
)
def test_a_part_that_weft_does_not_do_is_named(bert, tmp_path, file, content, message):
    model_folder = sentences(tmp_path / "st", bert[0])
    write(model_folder / file, content)
    with pytest.raises(CheckpointError) as error:
        weft.load(model_folder, device="cpu")
    assert message in str(error.value)
    assert str(model_folder) in str(error.value)
