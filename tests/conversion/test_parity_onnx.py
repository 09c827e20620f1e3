"""`weft convert` to ONNX: a model that is compared in ONNX Runtime as it is written, and what lies beside it."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from tests import onnx_models
from tests.onnx_models import BERT, GPT, LABELS, make
from tokenizers import Tokenizer as Engine
from typer.testing import CliRunner

import weft
from weft.cli.main import app
from weft.conversion import convert as conversion
from weft.conversion import parity_onnx
from weft.conversion.convert import convert
from weft.errors import CheckpointError, ConfigError, RoleError
from weft.formats.onnx import export, graph, layers
from weft.formats.sentence_transformers import Pooling

FILES = ["config.json", "model.onnx", "tokenizer.json", "tokenizer_config.json"]
SEPARATED = {"name": "bpe", "size": 300, "bytes": True, "specials": {"sep": "<|sep|>"}}
TASKS = {
    "classify": ({"name": "classify", "labels": LABELS}, BERT, None, {"logits"}),
    "classify by a gpt": ({"name": "classify", "labels": LABELS}, GPT, SEPARATED, {"logits"}),
    "tag": ({"name": "tag", "labels": LABELS, "scheme": "plain"}, BERT, None, {"logits"}),
    "span": ({"name": "span", "max_question_length": 20}, BERT, None, {"start_logits", "end_logits"}),
    "choice": ({"name": "choice"}, BERT, None, {"logits"}),
    "mlm": ({"name": "mlm"}, BERT, None, {"logits", "last_hidden_state", "seq_relationship_logits"}),
    "order": ({"name": "mlm", "sentence_order": True}, BERT, None, {"logits", "last_hidden_state", "sop_logits"}),
    "electra": ({"name": "electra", "generator_size": 0}, BERT, None, {"logits"}),
    "embed": ({"name": "embed"}, BERT, None, {"last_hidden_state", "pooler_output"}),
    "contrastive": ({"name": "contrastive", "pool": "cls"}, BERT, None, {"last_hidden_state", "sentence_embedding"}),
}


def saved(folder, task="classify"):
    """Save a model with random weights as a checkpoint."""
    make(*TASKS[task][:3]).save(folder)
    return folder


@pytest.mark.parametrize("task", TASKS)
def test_each_output_of_each_task_is_compared(tmp_path, task):
    report = convert(saved(tmp_path / "weft", task), tmp_path / "onnx" / "model.onnx")
    assert {check.quantity for check in report.checks} == {"tokens", *TASKS[task][3]}
    assert {check.against for check in report.checks} == {"tokenizer.json", "ONNX Runtime"}
    assert max(check.difference for check in report.checks) < 2e-5
    assert report.checks[0].count > 100
    names = sorted(path.name for path in (tmp_path / "onnx").iterdir())
    assert names == (FILES if task != "contrastive" else sorted([*FILES, "modules.json", *ST_FILES]))


ST_FILES = ["1_Pooling", "2_Normalize", "sentence_bert_config.json"]


def test_without_onnx_runtime_onnxs_own_evaluator_runs_it(tmp_path, monkeypatch):
    monkeypatch.setattr(parity_onnx, "find_spec", lambda name: None)
    report = convert(saved(tmp_path / "weft"), tmp_path / "onnx" / "model.onnx")
    assert [check.against for check in report.checks] == ["tokenizer.json", "onnx's reference evaluator"]
    assert report.checks[1].difference < 2e-5


def without_mask(graph, mask, causal):
    return graph.floats(0)


def plain_tokenizer(folder, tokenizer, family, longest):
    tokenizer.engine.save(str(folder / "tokenizer.json"))


@pytest.mark.parametrize(
    ("place", "name", "wrong", "message"),
    [
        (layers, "attention_bias", without_mask, r"model.onnx: logits differ by .* from those of ONNX Runtime, where "),
        (export, "write_tokenizer", plain_tokenizer, r"model.onnx: tokens differ by .* from those of tokenizer.json"),
    ],
)
@pytest.mark.parametrize("exists", [False, True])
def test_what_computes_differently_is_not_left_there(tmp_path, monkeypatch, place, name, wrong, message, exists):
    """The negative control: attention to the padding, and a tokenizer that adds no special tokens."""
    checkpoint = saved(tmp_path / "weft")
    monkeypatch.setattr(place, name, wrong)
    (tmp_path / "onnx").mkdir() if exists else None
    result = CliRunner().invoke(app, ["convert", str(checkpoint), str(tmp_path / "onnx" / "model.onnx")])
    assert result.exit_code != 0
    assert isinstance(result.exception, CheckpointError)
    with pytest.raises(CheckpointError, match=message + ".*; nothing was written"):
        raise result.exception
    assert not list(tmp_path.glob("onnx/*"))
    assert (tmp_path / "onnx").exists() == exists


def test_a_weight_that_changes_on_the_way_is_told(tmp_path, monkeypatch):
    checkpoint, written = saved(tmp_path / "weft"), export.write_onnx

    def write(folder, name, run, tokenizer, head, pooling):
        with torch.no_grad():
            head.output.bias[1] += 1e-3
        written(folder, name, run, tokenizer, head, pooling)
        with torch.no_grad():
            head.output.bias[1] -= 1e-3

    monkeypatch.setattr(export, "write_onnx", write)
    with pytest.raises(CheckpointError, match=r"logits differ by 0.001 from those of ONNX Runtime"):
        convert(checkpoint, tmp_path / "model.onnx")
    assert [path.name for path in tmp_path.iterdir()] == ["weft"]


# What lies beside it.


def test_the_tokenizer_and_the_labels_beside_it_are_all_that_is_needed(tmp_path):
    """The answer as a user of ONNX Runtime comes to it, from texts of different lengths."""
    convert(saved(tmp_path / "weft"), tmp_path / "onnx" / "model.onnx")
    pipeline = weft.load(tmp_path / "weft", device="cpu")
    texts = ["The lambda expression", "x", "An assignment statement evaluates the expression list."]
    engine = Engine.from_file(str(tmp_path / "onnx" / "tokenizer.json"))
    engine.enable_padding()
    encodings = engine.encode_batch(texts)
    inputs = {"input_ids": "ids", "attention_mask": "attention_mask", "token_type_ids": "type_ids"}
    inputs = {name: np.array([getattr(part, key) for part in encodings]) for name, key in inputs.items()}
    assert len({int(row.sum()) for row in inputs["attention_mask"]}) == 3
    logits = onnx_models.run(tmp_path / "onnx" / "model.onnx", inputs)["logits"]
    config = onnx_models.read(tmp_path / "onnx" / "config.json")
    labels = [config["id2label"][str(index)] for index in logits.argmax(-1)]
    assert labels == [answer["label"] for answer in pipeline(texts)]
    assert (config["model_type"], config["problem_type"]) == ("bert", "single_label_classification")
    assert onnx_models.read(tmp_path / "onnx" / "tokenizer_config.json")["model_max_length"] == 48


def test_transformers_reads_the_tokenizer_and_the_configuration(tmp_path):
    transformers = pytest.importorskip("transformers")
    convert(saved(tmp_path / "weft", "classify by a gpt"), tmp_path / "onnx" / "model.onnx")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "onnx")
    pipeline = weft.load(tmp_path / "weft", device="cpu")
    (item,) = pipeline.task.encode(
        pipeline.example(("a text", "another")), pipeline.tokenizer, pipeline.truncation_policy()
    )
    assert tokenizer("a text", "another").input_ids == item[0].tolist()
    config = transformers.AutoConfig.from_pretrained(tmp_path / "onnx")
    assert config.id2label == dict(enumerate(LABELS))


def test_a_tokenizer_lower_cases_where_the_model_of_sentence_vectors_does(tmp_path):
    pooling = Pooling("mean", normalize=True, lowercase=True)
    replace(make(*TASKS["embed"][:3]), pooling=pooling).save(tmp_path / "weft")
    report = convert(tmp_path / "weft", tmp_path / "onnx" / "model.onnx")
    assert report.checks[0].difference == 0
    engine = Engine.from_file(str(tmp_path / "onnx" / "tokenizer.json"))
    assert engine.encode("LAMBDA").ids == engine.encode("lambda").ids


def test_a_hugging_face_folder_may_have_its_onnx_model_too(tmp_path):
    checkpoint = saved(tmp_path / "weft")
    convert(checkpoint, tmp_path / "hf")
    before = {path.name: path.read_bytes() for path in (tmp_path / "hf").iterdir()}
    convert(checkpoint, tmp_path / "hf" / "model.onnx")
    after = {path.name: path.read_bytes() for path in (tmp_path / "hf").iterdir()}
    assert after.keys() - before.keys() == {"model.onnx"}
    assert all(after[name] == content for name, content in before.items())


def test_what_is_there_is_not_written_over(tmp_path):
    checkpoint = saved(tmp_path / "weft")
    (tmp_path / "onnx").mkdir()
    (tmp_path / "onnx" / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"onnx/config.json: exists already, and differs; choose a new folder"):
        convert(checkpoint, tmp_path / "onnx" / "model.onnx")
    assert [path.name for path in (tmp_path / "onnx").iterdir()] == ["config.json"]
    (tmp_path / "onnx" / "config.json").rename(tmp_path / "onnx" / "model.onnx")
    with pytest.raises(CheckpointError, match=r"model.onnx: exists already; choose a new name"):
        convert(checkpoint, tmp_path / "onnx" / "model.onnx")


def test_weights_too_large_for_one_file_are_in_a_second_one(tmp_path, monkeypatch):
    monkeypatch.setattr(graph, "MAX_BYTES", 1000)
    convert(saved(tmp_path / "weft"), tmp_path / "onnx" / "model.onnx").demand()
    assert (tmp_path / "onnx" / "model.onnx_data").stat().st_size > 50_000
    assert (tmp_path / "onnx" / "model.onnx").stat().st_size < 50_000


# What cannot be exported.


@pytest.mark.parametrize(
    ("task", "model", "message"),
    [
        ({"name": "lm"}, GPT, "task.name: 'lm' writes one token after another.* which CTranslate2 takes"),
        (
            {"name": "classify", "labels": LABELS},
            {"name": "rnn", "width": 8},
            "model.name: 'rnn' has no ONNX form here",
        ),
        ({"name": "tag", "labels": LABELS, "scheme": "plain", "crf": True}, BERT, "task.crf: .*train without it, or"),
        (
            {"name": "classify", "labels": LABELS, "symmetric": True},
            BERT,
            "task.symmetric: reads a pair in both orders",
        ),
    ],
)
def test_what_has_no_onnx_form_is_refused(tmp_path, task, model, message):
    make(task, model).save(tmp_path / "weft")
    with pytest.raises(RoleError, match=message):
        convert(tmp_path / "weft", tmp_path / "model.onnx")
    assert [path.name for path in tmp_path.iterdir()] == ["weft"]


def test_without_onnx_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(conversion, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs onnx, which is not installed: pip install 'weft\[onnx\]'"):
        convert("encoder-en", tmp_path / "model.onnx")


def test_an_onnx_model_is_not_read(tmp_path):
    with pytest.raises(CheckpointError, match=r"model.onnx: weft writes ONNX models, and reads none"):
        convert(tmp_path / "model.onnx", tmp_path / "weft")


# The command line, and a model that ships.


def test_the_command_line_from_a_bundled_model_to_words(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["convert", "encoder-en", "filler.onnx"])
    assert result.exit_code == 0, result.output
    assert "largest difference" in result.output
    assert result.output.count("ONNX Runtime") == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*FILES[:1], "filler.onnx", *FILES[2:]])
    engine = Engine.from_file("tokenizer.json")
    ids = np.array([engine.encode("The capital of France is [MASK].").ids])
    inputs = {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}
    logits = onnx_models.run(tmp_path / "filler.onnx", inputs)["logits"][0]
    (best,) = logits[ids[0] == engine.token_to_id("[MASK]")].argmax(-1)
    (answer,) = weft.load("encoder-en", device="cpu")("The capital of France is [MASK].")
    assert engine.id_to_token(int(best)) == answer["fills"][0][0]["token"]


def test_the_help_says_it():
    output = CliRunner().invoke(app, ["convert", "--help"], env={"COLUMNS": "200"}).output
    assert ".onnx" in output
    assert "ONNX" in output
