"""Export of an encoder with its head: model.onnx, and beside it what reads texts for it, as in Optimum's folders.

model.onnx               the model, under the name that is asked for
config.json              sizes, special tokens, labels (id2label)
tokenizer.json           the tokenizer, which adds the special tokens of a text or a pair
tokenizer_config.json    the names of the special tokens, the maximum length
modules.json, …          of a model of sentence vectors, those of sentence-transformers
"""

from dataclasses import replace
from pathlib import Path

from tokenizers import Tokenizer as Engine
from tokenizers.normalizers import Lowercase, Sequence

from weft.config.run import Run
from weft.errors import RoleError
from weft.formats.huggingface.folder import closest_family, hf_config
from weft.formats.huggingface.tokenizer import write_json_object, write_tokenizer
from weft.formats.onnx.graph import Graph
from weft.formats.onnx.heads import has_segments, model_inputs, model_outputs
from weft.formats.sentence_transformers import Pooling, export_pooling
from weft.tasks.head import Head
from weft.tokenization.base import Tokenizer

TASKS = ("choice", "classify", "electra", "embed", "mlm", "span", "tag")
GENERATORS = ("lm", "translate")
OPTIONS = {
    "symmetric": "reads a pair in both orders, which is two runs of the model; train without it",
    "crf": "searches for the best sequence of tags, which is no layer of a graph; train without it",
}


def check_exportable(run: Run) -> None:
    """Raise an error for a model or a task that has no ONNX form."""
    name, task = run.model.name, run.task.name
    if task in GENERATORS:
        raise RoleError(
            f"task.name: {task!r} writes one token after another, and an ONNX model is one pass over a text; serve it "
            "by weft serve or, if it is a gpt or a Marian, convert it to a folder, which CTranslate2 takes"
        )
    if name not in ("bert", "gpt") or task not in TASKS:
        key, value = ("task.name", task) if name in ("bert", "gpt") else ("model.name", name)
        raise RoleError(
            f"{key}: {value!r} has no ONNX form here; a bert and a gpt have, with the tasks {', '.join(TASKS)} and "
            "contrastive; fine-tune one (model.weights: encoder-en), or serve this one by weft serve"
        )
    for key, reason in OPTIONS.items():
        if getattr(run.task, key, False):
            raise RoleError(f"task.{key}: {reason}, or serve this one by weft serve")


def write_onnx(
    folder: Path, name: str, run: Run, tokenizer: Tokenizer, head: Head, pooling: Pooling | None = None
) -> None:
    """Write a model under a name into a folder, with its tokenizer and its configuration; an encoder has a pooling."""
    graph = Graph(head)
    graph.save(folder / name, model_inputs(run), model_outputs(graph, run, head, pooling))
    family = replace(closest_family(run), framed=True, token_types=has_segments(run))
    write_json_object(folder / "config.json", hf_config(family, run, tokenizer))
    write_tokenizer(folder, tokenizer, family, head.body.max_positions)
    if pooling is not None:
        export_pooling(folder, pooling, head.body.width)
        if pooling.lowercase:
            _lowercase(folder / "tokenizer.json")


def _lowercase(path: Path) -> None:
    """Let a tokenizer lower-case its texts, as the embedder of such a model does."""
    engine = Engine.from_file(str(path))
    engine.normalizer = Sequence([Lowercase(), *([engine.normalizer] if engine.normalizer else [])])
    engine.save(str(path))
