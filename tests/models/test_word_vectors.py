"""Which tables start from which file, and which of them are trained."""

import pytest
import torch
from torch import nn

from weft.config.schema import read_section
from weft.errors import ConfigError
from weft.models.cnn import CNN
from weft.models.rnn import RNN
from weft.models.seq2seq.model import Seq2Seq
from weft.models.transformer import Transformer
from weft.models.word2vec.model import Word2Vec
from weft.models.word_vectors import keep_static
from weft.testing import check_model
from weft.tokens import Tokens

SIZES = {Transformer: {"width": 4, "heads": 2, "layers": 1, "ffn_width": 4}}


def make(model, target_vocab=None, **config):
    name = model.__name__.lower()
    section = {"name": name, **SIZES.get(model, {"width": 6}), **config}
    return model(read_section(model.Config, section, "model"), 7, target_vocab)


@pytest.mark.parametrize("model", [CNN, RNN, Word2Vec, Seq2Seq, Transformer])
def test_every_body_with_one_vocabulary_names_its_table(model):
    (tables,) = make(model).word_embeddings().values()
    assert [table.weight.shape[0] for table in tables] == [7]


@pytest.mark.parametrize("model", [Seq2Seq, Transformer])
def test_two_vocabularies_have_a_table_each(model):
    tables = make(model, target_vocab=5).word_embeddings()
    assert {key: len(table.weight) for key, (table,) in tables.items()} == {"vectors": 7, "target_vectors": 5}


def test_a_decoder_that_reads_no_target_has_no_table_for_it():
    assert list(make(Seq2Seq, target_vocab=5, feedback=False).word_embeddings()) == ["vectors"]


def test_a_static_table_of_an_rnn_gets_no_gradient():
    check_model(RNN, {"width": 6, "direction": "both", "vectors": "x", "channels": "static"})
    tokens = Tokens.pack([[1, 2, 3], [4]])
    for channels in ("static", "nonstatic"):
        model = make(RNN, vectors="x", channels=channels)
        model.encode(tokens).square().sum().backward()
        assert (model.embed.weight.grad is None) == (channels == "static")
        assert any(value.grad is not None for value in model.recurrent.parameters())


def test_a_tied_table_is_not_static():
    table = nn.Embedding(3, 2)
    with pytest.raises(ConfigError, match="model.channels: static .* set model.tie: false, or model.channels: nonst"):
        keep_static(table, tied=True)
    assert table.weight.requires_grad
    with pytest.raises(ConfigError, match="set model.tie: false"):
        make(RNN, vectors="x", channels="static", tie=True)


@pytest.mark.parametrize("model", [CNN, RNN, Seq2Seq, Transformer])
def test_without_a_file_nothing_is_static(model):
    with pytest.raises(ConfigError, match="model.channels: static keeps .* there is no model.vectors; name a file"):
        make(model, channels="static")
    with pytest.raises(ConfigError, match="model.channels"):
        make(model, vectors="x", channels="frozen")
    assert all(value.requires_grad for value in make(model, vectors="x").parameters())


def test_two_channels_of_other_models_are_refused():
    for model in (RNN, Seq2Seq, Transformer):
        with pytest.raises(ConfigError, match="model.channels"):
            make(model, vectors="x", channels="multichannel")
    assert torch.equal(
        *(table.weight for table in make(CNN, vectors="x", channels="multichannel").word_embeddings()["vectors"])
    )
