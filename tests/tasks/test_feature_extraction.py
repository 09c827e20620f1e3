"""Feature extraction: a bare encoder returns vectors, and raises for anything else."""

import pytest

import weft
from weft.config.run import Run
from weft.errors import RoleError
from weft.pipeline import Pipeline
from weft.tasks.factory import build
from weft.tokenization.trainable import train_tokenizer


def make_pipeline(pooler=True):
    raw = {
        "task": {"name": "embed", "pooler": pooler},
        "data": {"train": [], "max_length": 20},
        "tokenizer": {"name": "characters"},
        "model": {"name": "bert", "width": 8, "heads": 2, "layers": 1, "max_positions": 32},
        "train": {"steps": 1},
    }
    run = Run.parse(raw)
    tokenizer = train_tokenizer(run.tokenizer, iter(["abc", "de"]))
    task, head = build(run, tokenizer)
    return Pipeline(run, task, tokenizer, head.eval())


def test_it_makes_vectors():
    assert make_pipeline().embed(["abc", "d"]).shape == (2, 8)
    names = {name.partition(".")[0] for name, _ in make_pipeline().head.body.named_parameters()}
    assert not {"transform", "output"} & names, "it fills nothing"


def test_it_has_a_pooler_or_none():
    whole, bare = make_pipeline(), make_pipeline(pooler=False)
    assert whole.head.body.pooler is not None
    assert bare.head.body.pooler is None
    own = {name for name, _ in whole.head.named_parameters()} - {name for name, _ in bare.head.named_parameters()}
    assert own == {"body.pooler.weight", "body.pooler.bias"}


def test_it_answers_and_learns_nothing(tmp_path):
    pipeline = make_pipeline()
    with pytest.raises(RoleError, match=r"'embed' is a bare encoder, .* name it in that recipe's model.weights"):
        pipeline("abc")
    with pytest.raises(RoleError, match="bare encoder"):
        pipeline.evaluate([{"text": "abc"}])
    with pytest.raises(RoleError, match="bare encoder"):
        pipeline.head(None)
    pipeline.save(tmp_path / "it")
    assert (weft.load(tmp_path / "it", device="cpu").embed("abc") == pipeline.embed("abc")).all()
