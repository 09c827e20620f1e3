"""Import and export of ARPA files, from Python and from the command line."""

import numpy as np
import pytest
import torch

import weft
from weft.errors import CheckpointError, DataError, RoleError
from weft.formats.arpa import arpa_tokens, export_arpa, import_arpa
from weft.formats.arpa_text import read_arpa

TEXT = ["the cat sat", "the cat ran off", "a dog sat", "<unk> cat", "the dog ran", "a cat sat down", "the end"] * 3


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ngram")
    (folder / "text.txt").write_text("".join(f"{line}\n" for line in TEXT))
    recipe = {
        "task": {"name": "lm"},
        "data": {"train": str(folder / "text.txt"), "valid": str(folder / "text.txt")},
        "tokenizer": {"name": "words", "split": "whitespace"},
        "model": {"name": "ngram", "order": 3},
        "train": {"steps": 1},
    }
    return weft.train(recipe, out=folder / "run")


def test_out_and_in_again_it_is_the_same_model(tmp_path, pipeline):
    assert export_arpa(pipeline, tmp_path / "model.arpa") == tmp_path / "model.arpa"
    folder = import_arpa(tmp_path / "model.arpa", tmp_path / "back")
    back = weft.load(folder, device="cpu")
    assert back.run.model.order == 3
    assert arpa_tokens(back.tokenizer) == arpa_tokens(pipeline.tokenizer)
    for text in ("the cat sat", "a bird"):
        (before,), (after,) = pipeline([text]), back([text])
        assert before["text"] == after["text"]
        assert before["logprob"] == pytest.approx(after["logprob"], abs=1e-4)
    for name in ("orders", "words", "first"):
        assert torch.equal(getattr(back.head.body, name), getattr(pipeline.head.body, name))
    np.testing.assert_allclose(back.head.body.logp, pipeline.head.body.logp, atol=1e-5)
    examples = [{"text": line} for line in TEXT]
    assert back.evaluate(examples) == pytest.approx(pipeline.evaluate(examples), rel=1e-5)


def test_a_saved_run_is_written_as_well(tmp_path, pipeline):
    pipeline.save(tmp_path / "saved")
    export_arpa(tmp_path / "saved", tmp_path / "new" / "model.arpa.gz")
    model, words = read_arpa(tmp_path / "new" / "model.arpa.gz")
    assert len(words) == model.vocab == len(pipeline.tokenizer)
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["model.arpa.gz"]


def test_nothing_is_written_over(tmp_path, pipeline):
    (tmp_path / "model.arpa").write_text("mine")
    with pytest.raises(CheckpointError, match="model.arpa: exists already; choose a new file"):
        export_arpa(pipeline, tmp_path / "model.arpa")
    assert (tmp_path / "model.arpa").read_text() == "mine"


def test_what_is_no_n_gram_model_is_refused(tmp_path, reverser):
    with pytest.raises(RoleError, match="ARPA is a format of n-gram models, but the model is 'seq2seq'"):
        export_arpa(reverser, tmp_path / "model.arpa")
    with pytest.raises(DataError, match=r"none.arpa: cannot be read"):
        import_arpa(tmp_path / "none.arpa", tmp_path / "out")
    assert not (tmp_path / "out").exists()
