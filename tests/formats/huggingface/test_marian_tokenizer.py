"""Import and export of Marian: parity with transformers in numbers and translations, greedy and by beam search."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.hf_folders import transformers
from tests.marian_folders import TEXTS, marian, read_tokenizer

import weft
from weft.conversion.convert import convert
from weft.errors import CheckpointError
from weft.formats.huggingface.folder import save_hf
from weft.nn.attention.positions import Sinusoidal
from weft.tokenization.trainable import Characters, train_tokenizer
from weft.tokens import Tokens

CASES = {
    "opus": {"seed": 2},
    "no bias, another depth": {"seed": 1, "bias": 0.0, "decoder_layers": 3, "activation_function": "relu"},
    "six beams": {"seed": 2, "search": {"num_beams": 6, "length_penalty": 0.6}},
    "the first to end": {"seed": 4, "search": {"early_stopping": True}},
    "until it is sure": {"seed": 2, "search": {"early_stopping": "never", "min_length": 5}},
    "short": {"seed": 3, "search": {"max_length": 12}},
    "repetition penalized": {"seed": 2, "search": {"repetition_penalty": 1.4}},
    "repetition not scaled": {"seed": 2, "search": {"repetition_penalty": 1.7, "renormalize_logits": False}},
    "no bigram twice": {"seed": 2, "search": {"no_repeat_ngram_size": 2, "min_length": 6}},
    "not scaled": {"seed": 2, "search": {"renormalize_logits": False, "num_beams": 1}},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Return, for each case, a directory with transformers' model and tokenizer; read-only."""
    root = tmp_path_factory.mktemp("marian")
    return {name: (root / name, *marian(root / name, **how)) for name, how in CASES.items()}


@pytest.fixture
def copy(folders, tmp_path):
    """Return a folder that may be changed."""
    return shutil.copytree(folders["opus"][0], tmp_path / "copy")


@torch.no_grad()
def check_numbers(pipeline, model, tokenizer):
    """Compare all layers of both sides and the logits, each text alone in transformers, all in one batch in weft."""
    body, specials = pipeline.head.body, pipeline.tokenizer.specials
    sources = [[*ids, specials.eos] for ids in pipeline.tokenizer.ids(TEXTS)]
    targets = [[specials.bos, *ids] for ids in pipeline.tokenizer.target.ids(TEXTS)]
    assert sources == tokenizer(TEXTS)["input_ids"]
    assert [ids[1:] for ids in targets] == tokenizer(text_target=TEXTS, add_special_tokens=False)["input_ids"]
    source, target = Tokens.pack(sources), Tokens.pack(targets)
    encoded, decoded = body.states(target, source)
    states = {"encoder_hidden_states": (encoded, source), "decoder_hidden_states": (decoded, target)}
    logits = target.split(body.logits(target, source))
    for row, (given, read) in enumerate(zip(sources, targets, strict=True)):
        sides = {"input_ids": torch.tensor([given]), "decoder_input_ids": torch.tensor([read])}
        output = model(**sides, output_hidden_states=True)
        torch.testing.assert_close(logits[row], output.logits[0], rtol=0, atol=1e-5)
        for side, (layers, tokens) in states.items():
            for mine, theirs in zip(layers, output[side], strict=True):
                torch.testing.assert_close(tokens.split(mine)[row], theirs[0], rtol=0, atol=1e-5)


@torch.no_grad()
def translations(model, tokenizer, **how):
    read = tokenizer(TEXTS, return_tensors="pt", padding=True)
    return tokenizer.batch_decode(model.generate(**read, **how), skip_special_tokens=True)


def texts_of(pipeline, options=None):
    return [answer["text"] for answer in pipeline(TEXTS, options)]


# Import.


@pytest.mark.parametrize("case", CASES)
def test_what_transformers_wrote_is_answered_the_same(folders, case):
    folder, model, tokenizer = folders[case]
    pipeline = weft.load(folder, device="cpu")
    check_numbers(pipeline, model, tokenizer)
    own = translations(model, tokenizer)
    assert texts_of(pipeline) == own
    for beams in {1, 4} - {model.generation_config.num_beams}:
        assert texts_of(pipeline, {"beam": beams}) == translations(model, tokenizer, num_beams=beams)
    assert len(set(own)) > 5


def test_another_weight_bias_or_way_to_search_is_caught(folders):
    """The negative controls: the comparison above depends on each of these."""
    folder, model, tokenizer = folders["opus"]
    own = translations(model, tokenizer)
    assert texts_of(weft.load(folder, device="cpu")) == own
    changes = {
        "early_stopping": "sure",
        "length_penalty": "none",
        "max_length": 20,
        "renormalize_logits": False,
        "finish": False,
    }
    for key, value in {**changes, "beam": 1}.items():
        assert texts_of(weft.load(folder, device="cpu"), {key: value}) != own, key
    pipeline = weft.load(folder, device="cpu")
    with torch.no_grad():
        pipeline.head.body.output.bias += 0.1 * torch.randn(len(pipeline.tokenizer))
    with pytest.raises(AssertionError, match="not close"):
        check_numbers(pipeline, model, tokenizer)
    _, other, _ = folders["short"]
    with pytest.raises(AssertionError, match="not close"):
        check_numbers(weft.load(folder, device="cpu"), other, tokenizer)


def test_repetition_options_change_what_is_written(folders):
    """The negative control: the comparison above depends on them."""
    folder, model, tokenizer = folders["repetition penalized"]
    pipeline, own = weft.load(folder, device="cpu"), translations(model, tokenizer)
    assert texts_of(pipeline) == own
    assert (
        texts_of(pipeline, {"repetition_penalty": 1.0}) == translations(model, tokenizer, repetition_penalty=1.0) != own
    )
    again = texts_of(pipeline, {"no_repeat_ngram_size": 1})
    assert again == translations(model, tokenizer, no_repeat_ngram_size=1) != own


def test_what_it_says_of_itself(folders):
    run = weft.load(folders["opus"][0], device="cpu").run.dump()
    assert run["task"]["name"] == "translate"
    assert run["task"]["unknown"]
    decode = run["task"]["decode"]
    assert (decode["beam"], decode["max_length"], decode["length_penalty"], decode["alpha"]) == (4, 39, "average", 1.0)
    assert (decode["finish"], decode["renormalize_logits"], decode["early_stopping"]) == (True, True, "soon")
    assert run["model"]["positions"] == "halves"
    assert run["data"]["max_length"] == 159  # and the sign of the end
    assert run["tokenizer"]["specials"] == {"unk": "<unk>", "eos": "</s>", "pad": "<pad>", "bos": "<pad>"}


def test_how_it_decodes_may_stand_in_its_config(folders, copy):
    """As in older directories."""
    config, generation = (json.loads((copy / name).read_text()) for name in ("config.json", "generation_config.json"))
    (copy / "config.json").write_text(json.dumps({**generation, **config}), encoding="utf-8")
    (copy / "generation_config.json").unlink()
    _, model, tokenizer = folders["opus"]
    assert texts_of(weft.load(copy, device="cpu")) == translations(model, tokenizer)


def test_a_text_of_as_many_tokens_as_it_has_positions(folders):
    """The sinusoids are exact at the last position, too."""
    folder, model, _ = folders["opus"]
    pipeline = weft.load(folder, device="cpu")
    ids = (pipeline.tokenizer.ids([" ".join(TEXTS)])[0] * 3)[:159]
    source, target = Tokens.pack([[*ids, 0]]), Tokens.pack([[pipeline.tokenizer.specials.bos, *ids]])
    with torch.no_grad():
        expected = model(input_ids=source.ids[None], decoder_input_ids=target.ids[None]).logits[0]
        torch.testing.assert_close(pipeline.head.body.logits(target, source), expected, rtol=0, atol=1e-5)


# Export.


@pytest.mark.parametrize("case", CASES)
def test_what_weft_writes_is_answered_the_same(folders, case, tmp_path):
    folder, model, tokenizer = folders[case]
    pipeline = weft.load(folder, device="cpu")
    save_hf(tmp_path / "hf", pipeline.run, pipeline.tokenizer, pipeline.head)
    back = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "hf").eval()
    cut = read_tokenizer(tmp_path / "hf")
    assert type(back).__name__ == "MarianMTModel"
    assert type(cut).__name__ == "MarianTokenizer"
    assert back.state_dict().keys() == model.state_dict().keys()
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, back.state_dict()[name]), name
    assert cut(TEXTS)["input_ids"] == tokenizer(TEXTS)["input_ids"]
    assert translations(back, cut) == translations(model, tokenizer)
    for name in ("source.spm", "target.spm"):
        assert (tmp_path / "hf" / name).read_bytes() == (folder / name).read_bytes()
    assert weft.load(tmp_path / "hf", device="cpu").run == pipeline.run


def test_a_conversion_there_and_back_reports_on_everything(folders, tmp_path):
    reports = [convert(folders["opus"][0], tmp_path / "ours"), convert(tmp_path / "ours", tmp_path / "theirs")]
    for report in reports:
        report.demand()
        quantities = {check.quantity.partition(",")[0] for check in report.checks if check.against == "transformers"}
        kinds = {"tokens", "encoder's states", "decoder's states", "logits", "greedy text", "text by beam 4"}
        assert quantities == kinds
    ours, theirs = (weft.load(tmp_path / name, device="cpu") for name in ("ours", "theirs"))
    assert texts_of(ours) == texts_of(theirs)


def test_a_conversion_that_changed_something_is_refused(folders, tmp_path, monkeypatch):
    """The negative control: positions in the order of the paper."""
    halves = Sinusoidal.forward
    monkeypatch.setattr(Sinusoidal, "forward", lambda self, *given: halves(Sinusoidal(self.width), *given))
    report = convert(folders["opus"][0], tmp_path / "ours")
    with pytest.raises(CheckpointError, match="encoder's states, most in layer . differ by .* from those of transform"):
        report.demand()


def test_fine_tuning_goes_on_from_it_and_comes_back(folders, tmp_path):
    """A Marian can be fine-tuned on pairs, and exported as a Marian again."""
    folder, *_ = folders["opus"]
    (tmp_path / "pairs.tsv").write_text("the value\tan object\nan object\tthe value\n" * 4, encoding="utf-8")
    recipe = {
        "task": {"name": "translate"},
        "data": {"train": str(tmp_path / "pairs.tsv")},
        "model": {"name": "transformer", "weights": str(folder)},
        "train": {"steps": 60, "batch_tokens": 100, "lr": 0.01, "report_every": 30},
    }
    trained = weft.train(recipe, ["model.dropout=0"], tmp_path / "run")
    assert [answer["text"] for answer in trained(["the value", "an object"])] == ["an object", "the value"]
    save_hf(tmp_path / "hf", trained.run, trained.tokenizer, trained.head)
    model = transformers.MarianMTModel.from_pretrained(tmp_path / "hf").eval()
    cut = read_tokenizer(tmp_path / "hf")
    output = model.generate(**cut(["the value"], return_tensors="pt"))
    assert cut.batch_decode(output, skip_special_tokens=True) == ["an object"]


# Errors.


@pytest.mark.parametrize(
    ("file", "changes", "message"),
    [
        ("config.json", {"scale_embedding": False}, "scale_embedding is False, but weft supports only True"),
        ("config.json", {"scale_embedding": None}, "scale_embedding is False"),
        ("config.json", {"share_encoder_decoder_embeddings": False}, "share_encoder_decoder_embeddings is False"),
        ("config.json", {"decoder_attention_heads": 2}, "encoder_attention_heads is 4 and decoder_attention_heads 2"),
        ("config.json", {"activation_function": "mish"}, "activation_function is 'mish', which weft does not support"),
        ("config.json", {"decoder_start_token_id": 10**6}, "decoder_start_token_id must be a token, but is 1000000"),
        ("config.json", {"vocab_size": 7}, "vocab_size is 7, but the embeddings"),
        ("tokenizer_config.json", {"separate_vocabs": True}, "separate_vocabs is true"),
        ("tokenizer_config.json", {"eos_token": "<|end|>"}, "vocab.json: lacks the special token <|end|>"),
        ("generation_config.json", {"num_beam_groups": 3}, "num_beam_groups is 3, which weft's search does"),
        ("generation_config.json", {"early_stopping": "now"}, "early_stopping: should be a valid boolean or 'never'"),
        ("generation_config.json", {"num_beams": "4"}, "generation.num_beams: should be a valid integer, but is '4'"),
        ("generation_config.json", {"num_beams": True}, "generation.num_beams: should be a valid integer, but is True"),
        ("generation_config.json", {"max_length": [5]}, "generation.max_length: should be a valid integer, but is [5]"),
        ("generation_config.json", {"bad_words_ids": 5}, "generation.bad_words_ids"),
        ("config.json", {"decoder_start_token_id": True}, "decoder_start_token_id must be a token, but is True"),
        ("config.json", {"max_position_embeddings": "9"}, "model.max_positions: should be a valid integer"),
        ("generation_config.json", {"bad_words_ids": [[5]]}, "bad_words_ids bars 5, but weft bars padding and"),
        ("generation_config.json", {"num_beams": -1}, "task.decode.beam: "),
        ("vocab.json", {"more": 5}, "must give each token an id of its own, from 0 on"),
    ],
)
def test_what_ours_has_not_is_refused(copy, file, changes, message):
    whole = json.loads((copy / file).read_text(encoding="utf-8")) | changes
    whole = {key: value for key, value in whole.items() if value is not None}
    (copy / file).write_text(json.dumps(whole), encoding="utf-8")
    with pytest.raises(CheckpointError) as error:
        weft.load(copy, device="cpu")
    assert message in str(error.value)
    assert str(copy) in str(error.value)


@pytest.mark.parametrize("name", ["source.spm", "target.spm", "vocab.json"])
def test_a_file_that_is_missing_is_named(copy, name):
    (copy / name).unlink()
    with pytest.raises(CheckpointError, match=name):
        weft.load(copy, device="cpu")


def test_a_weight_that_is_missing_or_strange_is_named(copy):
    weights = load_file(copy / "model.safetensors")
    bias = weights.pop("final_logits_bias")
    save_file(weights, copy / "model.safetensors")
    with pytest.raises(CheckpointError, match="lacks the weight final_logits_bias"):
        weft.load(copy, device="cpu")
    save_file({**weights, "final_logits_bias": bias, "model.more.weight": bias.clone()}, copy / "model.safetensors")
    with pytest.raises(CheckpointError, match="has the weight more.weight, which weft's marian does not have"):
        weft.load(copy, device="cpu")


def test_what_cannot_be_said_there_is_refused(folders, tmp_path):
    pipeline = weft.load(folders["opus"][0], device="cpu", overrides=["task.decode.length_penalty=gnmt"])
    with pytest.raises(
        CheckpointError, match="task.decode.length_penalty: 'gnmt' cannot be expressed in the format of marian"
    ):
        save_hf(tmp_path / "hf", pipeline.run, pipeline.tokenizer, pipeline.head)
    assert not (tmp_path / "hf").exists()
    asked = weft.load(folders["opus"][0], device="cpu", overrides={"task.prefix": ">>fra<<"})
    with pytest.raises(CheckpointError, match="task.prefix: '>>fra<<' cannot be expressed in the format of marian"):
        save_hf(tmp_path / "hf", asked.run, asked.tokenizer, asked.head)
    pipeline = weft.load(folders["opus"][0], device="cpu")
    names = {"unk": "<unk>", "eos": "</s>", "pad": "<pad>", "bos": "<pad>"}
    other = train_tokenizer(Characters.Config(name="characters", specials=names), ["a text"])
    with pytest.raises(CheckpointError, match="tokenizer.name: 'characters' is not what a Marian reads"):
        save_hf(tmp_path / "hf", pipeline.run, other, pipeline.head)
