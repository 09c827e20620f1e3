"""Import of published ELMo files: a tiny model in their format is compared with the equations."""

import json

import h5py
import numpy as np
import pytest
import torch
from tests import elmo_equations as paper

import weft
from weft.errors import CheckpointError, WeftError
from weft.formats import elmo
from weft.formats.elmo import import_elmo, read_elmo_config
from weft.tokens import CHAR_PAD, TEXT_BEGIN, TEXT_END, WORD_BEGIN, WORD_END, Tokens, char_ids

SENTENCES = [["The", "play", "was", "naïve", "."], ["日本語"], ["x" * 80, "play"]]
WORDS = ["play", "was", "The", "."]


def options(**changes):
    lstm = {"dim": 5, "projection_dim": 3, "n_layers": 2, "cell_clip": 0.5, "proj_clip": 0.5}
    cnn = {"embedding": {"dim": 4}, "filters": [[1, 2], [3, 4]], "n_highway": 2, "n_characters": 262}
    cnn |= {"max_characters_per_token": 50, "activation": "relu"}
    whole = {"lstm": {**lstm, "use_skip_connections": True}, "char_cnn": cnn, "n_tokens_vocab": 7}
    for key, value in changes.items():
        section, _, name = key.partition("__")
        whole[section] = {**whole[section], name: value}
    return whole


def arrays(seed=0, layers=2, highways=2):
    """Return random weights as bilm-tf writes them: (inputs, outputs), gates i, j, f, o, one matrix for x and h."""
    rng = np.random.default_rng(seed)
    shapes = {"char_embed": (261, 4), "CNN/W_cnn_0": (1, 1, 4, 2), "CNN/W_cnn_1": (1, 3, 4, 4)}
    shapes |= {"CNN/b_cnn_0": (2,), "CNN/b_cnn_1": (4,), "CNN_proj/W_proj": (6, 3), "CNN_proj/b_proj": (3,)}
    for n in range(highways):
        shapes |= {f"CNN_high_{n}/W_{part}": (6, 6) for part in ("carry", "transform")}
        shapes |= {f"CNN_high_{n}/b_{part}": (6,) for part in ("carry", "transform")}
    for way in (0, 1):
        for n in range(layers):
            cell = f"RNN_{way}/RNN/MultiRNNCell/Cell{n}/LSTMCell"
            shapes |= {f"{cell}/W_0": (6, 20), f"{cell}/B": (20,), f"{cell}/W_P_0": (5, 3)}
    return {name: rng.normal(0, 0.6, shape).astype(np.float32) for name, shape in shapes.items()}


def written(folder, config, weights):
    folder.mkdir()
    (folder / "options.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "vocab.txt").write_text("\n".join(["<S>", "</S>", "<UNK>", *WORDS]), encoding="utf-8")
    with h5py.File(folder / "weights.hdf5", "w") as file:
        for name, value in weights.items():
            file[name] = value
    return folder


@pytest.fixture
def published(tmp_path):
    return written(tmp_path / "published", options(), arrays())


def imported(folder, out, vocab=True):
    path = import_elmo(folder / "options.json", folder / "weights.hdf5", out, folder / "vocab.txt" if vocab else None)
    return weft.load(path, device="cpu")


def encoded(pipeline, sentences=SENTENCES):
    """Return the layers of each sentence, special tokens included."""
    special = pipeline.tokenizer.specials
    ids = [[special.bos, *pipeline.tokenizer.ids([" ".join(words)])[0], special.eos] for words in sentences]
    tokens = Tokens.pack(ids).with_chars([char_ids(["", *words, ""]) for words in sentences])
    with torch.inference_mode():
        layers = pipeline.head.body.encode(tokens, pipeline.head.body.mixable_layers)
    return [torch.stack([tokens.split(layer)[row] for layer in layers]) for row in range(len(sentences))]


def must(config, weights, sentences=SENTENCES):
    net = paper.of_bilm({name: torch.from_numpy(value).double() for name, value in weights.items()}, config)
    return [torch.stack(paper.encoded(net, ["<S>", *words, "</S>"])) for words in sentences]


def apart(one, other):
    return max(float((a.double() - b).abs().max()) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"lstm__use_skip_connections": False, "char_cnn__activation": "tanh"},
        {"lstm__n_layers": 1, "char_cnn__n_highway": 1},
        {"lstm__cell_clip": None, "lstm__proj_clip": None},
    ],
    ids=str,
)
def test_what_it_encodes_is_as_published(tmp_path, changes):
    config = options(**changes)
    weights = arrays(1, config["lstm"]["n_layers"], config["char_cnn"]["n_highway"])
    pipeline = imported(written(tmp_path / "p", config, weights), tmp_path / "out")
    assert apart(encoded(pipeline), must(config, weights)) < 1e-5


@pytest.mark.parametrize("broken", ["gates", "signs", "bias", "turned"])
def test_a_mistake_in_the_reading_would_be_seen(tmp_path, published, monkeypatch, broken):
    if broken == "gates":
        monkeypatch.setattr(elmo, "_GATES", [0, 1, 2, 3])
    if broken == "signs":
        monkeypatch.setattr(elmo, "CHAR_ROWS", list(range(261)))
    weights = arrays()
    if broken == "bias":
        weights["RNN_0/RNN/MultiRNNCell/Cell0/LSTMCell/B"] += 1
    if broken == "turned":
        weights["CNN_high_1/W_carry"] = weights["CNN_high_1/W_carry"].T
    assert apart(encoded(imported(published, tmp_path / "out")), must(options(), weights)) > 1e-3


def test_its_signs_are_theirs():
    assert sorted(elmo.CHAR_ROWS) == list(range(261))
    assert [elmo.CHAR_ROWS[char] for char in (TEXT_BEGIN, TEXT_END, WORD_BEGIN, WORD_END, CHAR_PAD)] == [
        256,
        257,
        258,
        259,
        260,
    ]


def test_it_is_a_checkpoint_like_any_other(tmp_path, published):
    pipeline = imported(published, tmp_path / "out")
    assert pipeline.run.task.name == "lm"
    assert {pipeline.tokenizer.token(id) for id in range(len(pipeline.tokenizer))} == {*WORDS, "<unk>", "<s>", "</s>"}
    first, second = pipeline.log_probs(["The play", "play The"])
    assert first == pytest.approx(3 * np.log(1 / 7)), "the file has no softmax: all words are equally likely"
    assert first == pytest.approx(second)
    with pytest.raises(CheckpointError, match="exists"):
        imported(published, tmp_path / "out")


def test_without_a_vocabulary_words_are_known_by_their_letters(tmp_path, published):
    assert apart(encoded(imported(published, tmp_path / "out", vocab=False)), must(options(), arrays())) < 1e-5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lstm__proj_clip": 1}, "cell_clip is 0.5 and proj_clip is 1.0, but weft's elmo has one bound"),
        ({"char_cnn__filters": [[1, 2], [1, 3]]}, "has a width twice"),
        ({"char_cnn__max_characters_per_token": 40}, "max_characters_per_token"),
        ({"char_cnn__activation": "swish"}, "activation"),
        ({"lstm__dim": "wide"}, "options.json.lstm.dim"),
    ],
)
def test_options_that_weft_has_not_are_refused(tmp_path, change, message):
    (tmp_path / "options.json").write_text(json.dumps(options(**change)))
    with pytest.raises(CheckpointError, match=message):
        read_elmo_config(tmp_path / "options.json")


def test_files_that_do_not_fit_are_refused(tmp_path, published):
    for config, message in (
        (options(lstm__dim=4_000_000), r"must be \(16000000, 3\) by the options, but is \(20, 3\) instead"),
        (options(lstm__dim="5"), "lstm.dim: should be a valid integer, but is '5' instead"),
        (options(lstm__dim=6), r"must be \(24, 3\) by the options, but is \(20, 3\) instead"),
        (options(lstm__n_layers=3), "has no 'RNN_0/RNN/MultiRNNCell/Cell2/LSTMCell/W_0', which the options require"),
    ):
        (published / "options.json").write_text(json.dumps(config))
        with pytest.raises(CheckpointError, match=message):
            imported(published, tmp_path / "out")
    (published / "options.json").write_text(json.dumps(options()))
    (published / "weights.hdf5").write_bytes(b"no HDF5")
    with pytest.raises(CheckpointError, match="weights.hdf5: cannot be read as the weights of an ELMo model"):
        imported(published, tmp_path / "out")
    (published / "options.json").write_text("{")
    with pytest.raises(CheckpointError, match="options.json: cannot be read as the options"):
        imported(published, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_h5py_is_asked_for_where_it_is_missing(tmp_path, published, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "h5py", None)
    with pytest.raises(WeftError, match=r"pip install 'weft\[elmo\]'"):
        imported(published, tmp_path / "out")
