"""Parity with transformers in both directions: same numbers, same text; and errors for bad directories."""

import json
import shutil
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tests import hf_folders
from tests.hf_folders import END, TEXTS, transformers
from tests.transformer_equations import spread_weights

import weft
from weft.config.run import Run
from weft.decoding.config import DecodingConfig
from weft.decoding.generate import generate
from weft.errors import CheckpointError
from weft.formats.huggingface.families import FAMILIES
from weft.formats.huggingface.folder import describe_hf, family_for, is_hf, load_hf, save_hf
from weft.formats.huggingface.mapping import HFMapping
from weft.tasks.factory import build
from weft.tokenization.trainable import train_tokenizer
from weft.tokens import Tokens

MAKERS = {"gpt2": hf_folders.gpt2, "openai-gpt": hf_folders.gpt}
STEPS = 50


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Return, for each family, a directory with transformers' model and tokenizer; read-only."""
    root = tmp_path_factory.mktemp("hf")
    return {name: (root / name, *make(root / name)) for name, make in MAKERS.items()}


def weights_of(pipeline):
    return {name: value.clone() for name, value in pipeline.head.state_dict().items()}


@torch.no_grad()
def check_same(pipeline, model, tokenizer):
    """Compare tokens, layers, logits and greedy text; each text alone in transformers, all in one batch in weft."""
    ids = [pipeline.tokenizer.encode(text).ids for text in TEXTS]
    assert ids == [tokenizer(text, add_special_tokens=False).input_ids for text in TEXTS]
    batch, body = Tokens.pack([[pipeline.tokenizer.specials.bos, *tokens] for tokens in ids]), pipeline.head.body
    layers = range(pipeline.run.model.layers + 1)
    states, logits = body.encode(batch, layers), body.logits(batch)
    hypotheses = generate(body, batch, pipeline.tokenizer.specials.eos, DecodingConfig(max_length=STEPS))
    for row, tokens in enumerate(batch.split()):
        output = model(tokens[None], output_hidden_states=True)
        span = slice(int(batch.starts[row]), int(batch.starts[row + 1]))
        for layer in layers:
            torch.testing.assert_close(states[layer, span], output.hidden_states[layer][0], rtol=0, atol=1e-5)
        torch.testing.assert_close(logits[span], output.logits[0], rtol=0, atol=1e-5)
        options = {"max_new_tokens": STEPS, "do_sample": False, "pad_token_id": 0}
        generated = model.generate(tokens[None], attention_mask=torch.ones_like(tokens)[None], **options)
        text = generated[0, len(tokens) :].tolist()
        ended = text[: text.index(pipeline.tokenizer.specials.eos)] if hypotheses[row][0].finished else text
        assert list(hypotheses[row][0].ids) == ended
        assert pipeline.tokenizer.decode(ended) == tokenizer.decode(ended)


# Import.


@pytest.mark.parametrize("family", MAKERS)
def test_what_transformers_wrote_is_answered_the_same(folders, family):
    folder, model, tokenizer = folders[family]
    check_same(weft.load(folder, device="cpu"), model, tokenizer)


def test_a_vocabulary_in_one_file_will_do(folders, tmp_path):
    model, tokenizer = hf_folders.gpt2(tmp_path / "one", files=False)
    assert not (tmp_path / "one" / "vocab.json").exists()
    pipeline = weft.load(tmp_path / "one", device="cpu")
    check_same(pipeline, model, tokenizer)
    assert pipeline.run.dump()["tokenizer"]["specials"] == {"bos": END, "eos": END}
    assert pipeline.tokenizer.specials.bos == pipeline.tokenizer.specials.eos == len(pipeline.tokenizer) - 1


@pytest.mark.parametrize(
    "config",
    [
        {"activation_function": "gelu"},
        {"activation_function": "relu", "n_inner": 40},
        {"tie_word_embeddings": False},
        {"n_layer": 1, "n_head": 1},
    ],
    ids=str,
)
def test_other_configurations_are_read(tmp_path, config):
    model, tokenizer = hf_folders.gpt2(tmp_path / "it", **config)
    pipeline = weft.load(tmp_path / "it", device="cpu")
    check_same(pipeline, model, tokenizer)
    assert pipeline.run.model.tie == config.get("tie_word_embeddings", True)


def test_a_body_alone_is_read_as_a_language_model(tmp_path):
    """The first GPT-2 was published like this: no prefix, and masks among the weights."""
    body, tokenizer = hf_folders.gpt2(tmp_path / "it", head="GPT2Model")
    tensors = load_file(tmp_path / "it" / "model.safetensors")
    assert "wte.weight" in tensors
    tensors["h.0.attn.bias"] = torch.ones(1, 1, 96, 96)
    save_file(tensors, tmp_path / "it" / "model.safetensors", metadata={"format": "pt"})
    whole = transformers.GPT2LMHeadModel(body.config).eval()
    whole.transformer.load_state_dict(body.state_dict())
    whole.tie_weights()
    check_same(weft.load(tmp_path / "it", device="cpu"), whole, tokenizer)


def test_weights_in_several_files_and_in_half_precision(folders, tmp_path):
    folder, model, tokenizer = folders["gpt2"]
    shutil.copytree(folder, tmp_path / "it")
    (tmp_path / "it" / "model.safetensors").unlink()
    model.save_pretrained(tmp_path / "it", max_shard_size="20KB")
    assert len(list((tmp_path / "it").glob("model-*.safetensors"))) > 1
    check_same(weft.load(tmp_path / "it", device="cpu"), model, tokenizer)
    half = {name: value.bfloat16() for name, value in load_file(folder / "model.safetensors").items()}
    shutil.copytree(folder, tmp_path / "half")
    save_file(half, tmp_path / "half" / "model.safetensors", metadata={"format": "pt"})
    pipeline = weft.load(tmp_path / "half", device="cpu")
    assert pipeline.head.body.embed.weight.dtype is torch.float32
    assert torch.equal(pipeline.head.body.embed.weight, half["transformer.wte.weight"].float())


def test_rows_beyond_the_vocabulary_are_kept(tmp_path):
    """Some models have more embeddings than tokens, so that the size is even."""
    model, tokenizer = hf_folders.gpt2(tmp_path / "it", vocab_size=448)
    pipeline = weft.load(tmp_path / "it", device="cpu")
    assert len(pipeline.tokenizer) == 448
    check_same(pipeline, model, tokenizer)


def test_heads_are_left_out_of_what_is_read(folders):
    folder = folders["gpt2"][0]
    whole, cut = (
        weft.load(folder, "cpu", overrides=overrides) for overrides in ([], ["model.pruned_heads={1: [0, 2]}"])
    )
    assert cut.head.body.decoder.blocks[1].attention.kept == [1]
    read = Tokens.pack([[5, 6, 7]])
    with torch.no_grad():
        whole.head.body.decoder.blocks[1].attention.out_proj.weight.view(24, 3, 8)[:, [0, 2]] = 0
        torch.testing.assert_close(cut.head.body.logits(read), whole.head.body.logits(read))
    with pytest.raises(CheckpointError, match=r"was trained with model.ffn_width=96, which cannot change to 192"):
        weft.load(folder, "cpu", overrides=["model.width=48"])


def test_another_weight_or_order_is_caught(folders, tmp_path):
    """The negative control: matrices that are not transposed, and queries in place of keys."""
    folder, model, tokenizer = folders["gpt2"]
    for number, change in enumerate((lambda w: w.t(), lambda w: w.roll(24, 1))):
        shutil.copytree(folder, tmp_path / str(number))
        tensors = load_file(folder / "model.safetensors")
        name = "transformer.h.1.attn.c_proj.weight" if number == 0 else "transformer.h.1.attn.c_attn.weight"
        tensors[name] = change(tensors[name]).contiguous()
        save_file(tensors, tmp_path / str(number) / "model.safetensors")
        with pytest.raises(AssertionError, match="not close"):
            check_same(weft.load(tmp_path / str(number), device="cpu"), model, tokenizer)


# Inference with imported models.


@torch.no_grad()
def test_log_probabilities_and_the_loss_are_those_of_transformers(folders):
    folder, model, _ = folders["gpt2"]
    pipeline = weft.load(folder, device="cpu")
    (answer,) = pipeline(
        "The lambda", {"sample": True, "seed": 4, "max_length": 12, "temperature": 1.0, "top_p": None, "logprobs": True}
    )
    end = pipeline.tokenizer.specials.eos
    read = [end, *pipeline.tokenizer.encode("The lambda").ids]
    written = generate(
        pipeline.head.body, Tokens.pack([read]), end, DecodingConfig(sample=True, seed=4, max_length=12), rows=[0]
    )[0][0]
    logs = model(torch.tensor([[*read, *written.ids]])).logits[0].log_softmax(-1)
    must = [float(logs[len(read) - 1 + place, token]) for place, token in enumerate(written.ids)]
    assert [value for _, value in answer["tokens"]][: len(must)] == pytest.approx(must, abs=1e-4)
    ids = pipeline.tokenizer.encode(TEXTS[0]).ids
    whole = torch.tensor([[end, *ids, end]])
    loss = float(model(whole, labels=whole).loss)
    assert pipeline.evaluate([TEXTS[0]])["loss"] == pytest.approx(loss, abs=1e-5)


def test_a_stream_is_the_answer_and_a_seed_the_sample(folders):
    pipeline = weft.load(folders["gpt2"][0], device="cpu")
    for options in (
        {"max_length": 20},
        {"sample": True, "seed": 1, "max_length": 20},
        {"sample": True, "seed": 1, "max_length": 20, "temperature": 0.5, "top_k": 9, "top_p": 0.8},
    ):
        (answer,) = pipeline("The lambda", options)
        assert "".join(pipeline.stream("The lambda", options)) == answer["text"]
        if options.get("sample"):
            assert pipeline("The lambda", {**options, "seed": 2}) != [answer]
    whole = pipeline("The lambda", {"sample": True, "seed": 1, "max_length": 40})[0]["text"]
    word = whole[10:13]
    options = {"sample": True, "seed": 1, "max_length": 40, "stop": [word]}
    (stopped,) = pipeline("The lambda", options)
    assert stopped["text"] == whole[: whole.index(word)]
    assert "".join(pipeline.stream("The lambda", options)) == stopped["text"]


def test_a_text_near_the_end_of_what_it_reads_shortens_its_own_answer_alone(folders):
    pipeline = weft.load(folders["gpt2"][0], device="cpu")
    long, short = " x" * 40, "The lambda"
    size = len(pipeline.tokenizer.encode(long).ids) + 1
    for options in ({"max_length": 40, "min_length": 40}, {"max_length": 40, "min_length": 40, "sample": True}):
        with_logprobs = {**options, "logprobs": True}
        together = pipeline([long, short, long], with_logprobs)
        assert [len(answer["tokens"]) for answer in together] == [96 - size + 1, 40, 96 - size + 1]
        assert together[0]["text"] == pipeline(long, with_logprobs)[0]["text"]
        alone = list(pipeline.answers([short], with_logprobs, start=1))
        assert together[1]["text"] == alone[0]["text"]


# Export.


def recipe(norm="pre", **parts):
    model = {"name": "gpt", "width": 24, "heads": 3, "layers": 2, "max_positions": 96, "norm": norm}
    recipe = {
        "task": {"name": "lm"},
        "data": {"train": "none.txt", "max_length": 64},
        "tokenizer": {"name": "bpe", "size": 400},
        "model": model,
        "train": {"steps": 1},
    }
    for name, change in parts.items():
        recipe[name] = {**recipe[name], **change}
    return recipe


def own(seed=0, **parts):
    """Make a model of weft's own, with random weights and a tokenizer of its own."""
    run = Run.parse(recipe(**parts))
    tokenizer = train_tokenizer(run.tokenizer, iter(hf_folders.LINES))
    task, head = build(run, tokenizer)
    torch.manual_seed(seed)
    spread_weights(head, 0.2)
    return weft.Pipeline(run, task, tokenizer, head.eval())


def read_back(folder):
    return (
        transformers.AutoModelForCausalLM.from_pretrained(folder),
        transformers.AutoTokenizer.from_pretrained(folder),
    )


@pytest.mark.parametrize(
    "parts",
    [
        {},
        {"norm": "post"},
        {"model": {"tie": False, "ffn_width": 40, "activation": "gelu"}},
        {"tokenizer": {"specials": {"bos": END, "eos": END}}},
        {"tokenizer": {"bytes": False}},
        {"tokenizer": {"name": "words"}},
        {"tokenizer": {"name": "characters"}},
    ],
    ids=str,
)
def test_what_weft_wrote_is_answered_the_same_by_transformers(tmp_path, parts):
    if parts.get("tokenizer", {}).get("name") == "characters":
        parts = {"tokenizer": {"name": "characters", "size": None}}
    pipeline = own(**parts)
    save_hf(tmp_path / "it", pipeline.run, pipeline.tokenizer, pipeline.head)
    model, tokenizer = read_back(tmp_path / "it")
    assert type(model).__name__ == {"pre": "GPT2LMHeadModel", "post": "OpenAIGPTLMHeadModel"}[pipeline.run.model.norm]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (
        pipeline.tokenizer.specials.bos,
        pipeline.tokenizer.specials.eos,
    )
    check_same(pipeline, model, tokenizer)
    begun = [] if pipeline.tokenizer.specials.bos == pipeline.tokenizer.specials.eos else [tokenizer.bos_token_id]
    assert tokenizer("a b").input_ids == [*begun, *pipeline.tokenizer.encode("a b").ids]
    back = weft.load(tmp_path / "it", device="cpu")
    assert back.run.tokenizer == pipeline.run.tokenizer
    assert back.run.model == pipeline.run.model
    for name, value in weights_of(back).items():
        assert torch.equal(value, weights_of(pipeline)[name])


@pytest.mark.parametrize("family", MAKERS)
def test_there_and_back_again_nothing_changes(folders, family, tmp_path):
    folder, model, tokenizer = folders[family]
    pipeline = weft.load(folder, device="cpu")
    pipeline.save(tmp_path / "weft")
    back = weft.load(tmp_path / "weft", device="cpu")
    save_hf(tmp_path / "hf", back.run, back.tokenizer, back.head)
    check_same(back, *read_back(tmp_path / "hf"))
    check_same(weft.load(tmp_path / "hf", device="cpu"), model, tokenizer)
    mine, theirs = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "hf"))
    assert set(mine) == set(theirs)
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"model": {"pruned_heads": {0: [1]}}},
            r"model.pruned_heads.0: \[1\] cannot be expressed in the format",
        ),
        (
            {"norm": "post", "model": {"norm": "post", "ffn_width": 7}},
            r"model.ffn_width: 7 cannot be expressed in the format of ope",
        ),
        (
            {"norm": "post", "model": {"norm": "post", "activation": "gelu"}},
            r"model.activation: 'gelu' cannot be",
        ),
        ({"model": {"name": "rnn", "width": 8}}, r"model.name: .rnn., as configured, has no counterpart.*gpt, transfo"),
        ({"task": {"name": "classify", "labels": ["a", "b"]}}, r"task.name: 'classify' has no counterpart among the"),
    ],
    ids=str,
)
def test_what_cannot_be_said_there_is_refused(tmp_path, change, message):
    raw = recipe(**{name: part for name, part in change.items() if name != "model"})
    model = change.get("model", {})
    raw["model"] = model if "name" in model else {**raw["model"], **model}
    run = Run.parse(raw)
    tokenizer = train_tokenizer(run.tokenizer, iter(hf_folders.LINES))
    _, head = build(run, tokenizer)
    with pytest.raises(CheckpointError, match=message):
        save_hf(tmp_path / "it", run, tokenizer, head)
    assert not any(tmp_path.iterdir())


def test_a_folder_that_is_there_is_not_written_over(tmp_path):
    pipeline = own()
    (tmp_path / "it").mkdir()
    with pytest.raises(CheckpointError, match="it: exists already; choose a new folder"):
        save_hf(tmp_path / "it", pipeline.run, pipeline.tokenizer, pipeline.head)
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be written"):
        save_hf(tmp_path / "file" / "it", pipeline.run, pipeline.tokenizer, pipeline.head)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "it"]


# Tokenizers.

quick = settings(derandomize=True, deadline=None, max_examples=75, database=None)
pieces = st.sampled_from(["the ", "lambda", " ", "\n", "é", "🙂", "東", "\x00", "x" * 40, "'s", "½", "\u200d", "1,2"])


@quick
@given(st.one_of(st.text(max_size=60), st.lists(pieces, max_size=12).map("".join)))
def test_gpt2s_tokenizer_id_for_id(text):
    mine, theirs = tokenizers()
    ids = mine.encode(text).ids
    assert ids == theirs(text).input_ids
    assert mine.decode(ids) == text
    assert mine.ids([text]) == [ids]


@cache
def tokenizers():
    with TemporaryDirectory() as folder:
        theirs = hf_folders.gpt2(Path(folder) / "it")[1]
        return weft.load(Path(folder) / "it", device="cpu").tokenizer, theirs


def test_what_spells_the_special_is_text_here():
    """The one difference: in transformers, the string of eos in a text becomes the special token."""
    mine, theirs = tokenizers()
    assert theirs(END).input_ids == [mine.specials.eos]
    assert mine.specials.eos not in mine.encode(END).ids
    assert mine.decode(mine.encode(END).ids) == END
    assert mine.lossless


# Invalid directories.


def edit(path, **changes):
    config = json.loads(path.read_text())
    path.write_text(json.dumps({key: value for key, value in {**config, **changes}.items() if value != "GONE"}))


def reshape(folder):
    tensors = load_file(folder / "model.safetensors")
    tensors["transformer.ln_f.weight"] = torch.ones(7)
    save_file(tensors, folder / "model.safetensors")


def rename(folder, old, new):
    tensors = load_file(folder / "model.safetensors")
    tensors[new] = tensors.pop(old)
    save_file(tensors, folder / "model.safetensors")


def refill(folder, name, change):
    tensors = load_file(folder / "model.safetensors")
    tensors[name] = change(tensors[name]).contiguous()
    save_file(tensors, folder / "model.safetensors")


def with_nan(weight):
    weight.view(-1)[3] = torch.nan
    return weight


def pickled(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def strayed(folder):
    index = {"weight_map": {"transformer.wte.weight": "../elsewhere.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def specials(folder, **config):
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


BAD = {
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "has no weights: looked for model.safetensors and"),
    "a pickle": (pickled, "pytorch_model.bin is a pickle, which can run code.*save_pretrained"),
    "cut short": (lambda f: (f / "model.safetensors").write_bytes(b"123"), "model.safetensors: cannot be read"),
    "a file elsewhere": (strayed, r"names the file '../elsewhere.safetensors', which is not in the folder"),
    "no index": (lambda f: (f / "model.safetensors.index.json").write_text("{}"), "must have a weight_map"),
    "no tokenizer": (lambda f: (f / "merges.txt").unlink(), "has no tokenizer: .* vocab.json and merges.txt"),
    "a bad vocabulary": (lambda f: (f / "vocab.json").write_text("[]"), "cannot be read as a tokenizer"),
    "no object": (lambda f: (f / "config.json").write_text("[]"), "must be an object, but is list instead"),
    "no JSON": (lambda f: (f / "config.json").write_text("{"), "config.json: cannot be read"),
    "another model": (lambda f: edit(f / "config.json", model_type="gpt_neo"), "model_type is 'gpt_neo', which weft"),
    "no model": (lambda f: edit(f / "config.json", model_type="GONE"), "model_type is None, which weft does not read"),
    "another class": (
        lambda f: edit(f / "config.json", architectures=["GPT2DoubleHeadsModel"]),
        r"architectures is \['GPT2DoubleHeadsModel'\].* of gpt2 it reads GPT2LMHeadModel, GPT2Model",
    ),
    "no size": (lambda f: edit(f / "config.json", vocab_size="GONE"), "vocab_size must be a number of tokens"),
    "another size": (lambda f: edit(f / "config.json", vocab_size=300), "vocab_size is 300, but the embeddings"),
    "another activation": (
        lambda f: edit(f / "config.json", activation_function="mish"),
        "activation_function is 'mish', which weft does not support",
    ),
    "another scale": (
        lambda f: edit(f / "config.json", scale_attn_by_inverse_layer_idx=True),
        "scale_attn_by_inverse_layer_idx is True, but weft supports only False",
    ),
    "a bad number": (lambda f: edit(f / "config.json", n_head=0), "config.json: model.heads"),
    "another width": (lambda f: edit(f / "config.json", n_embd=48), r"must be \(401, 48\), but is \(401, 24\) instead"),
    "another shape": (reshape, r"decoder.norm.weight must be \(24,\), but is \(7,\) instead"),
    "a weight too few": (
        lambda f: rename(f, "transformer.ln_f.bias", "transformer.ln_f.weight2"),
        r"lacks the weight ln_f.bias \(1 in all\)",
    ),
    "a weight too many": (
        lambda f: edit(f / "config.json", n_layer=1),
        r"has the weight h.1.attn.c_attn.bias, which weft's gpt2 does not have \(12 in all\)",
    ),
    "complex numbers": (
        lambda f: refill(f, "transformer.ln_f.bias", lambda weight: weight.to(torch.complex64)),
        "the weight transformer.ln_f.bias must be of float32, but is of torch.complex64 instead",
    ),
    "whole numbers": (
        lambda f: refill(f, "transformer.ln_f.bias", lambda weight: weight.to(torch.int8)),
        "the weight transformer.ln_f.bias must be of float32, but is of torch.int8 instead",
    ),
    "no dimension": (
        lambda f: refill(f, "transformer.h.0.attn.c_attn.weight", lambda weight: weight[0, 0]),
        r"the weight transformer.h.0.attn.c_attn.weight is \(\), which is not the shape",
    ),
    "no embeddings": (
        lambda f: refill(f, "transformer.wte.weight", lambda weight: weight[0, 0]),
        r"vocab_size is 401, but the embeddings transformer.wte.weight are \(\)",
    ),
    "not a number": (
        lambda f: refill(f, "transformer.ln_f.bias", with_nan),
        "decoder.norm.bias: 1 of its 24 values are NaN or infinite",
    ),
    "too large for float32": (
        lambda f: refill(f, "transformer.ln_f.bias", lambda weight: weight.double() + 1e300),
        "decoder.norm.bias: 24 of its 24 values are NaN or infinite",
    ),
    "no such special": (lambda f: specials(f, bos_token="<|no|>"), "its vocabulary does not have <.no.>"),
    "another kind": (lambda f: specials(f, weft={"name": "wordpiece"}), "does not have .PAD."),
    "code": (lambda f: specials(f, weft={"name": "my:Code"}), "'my:Code' is no tokenizer of weft's"),
}


@pytest.mark.parametrize("bad", BAD)
def test_bad_folders_are_refused(folders, tmp_path, bad):
    spoil, message = BAD[bad]
    shutil.copytree(folders["gpt2"][0], tmp_path / "it")
    assert is_hf(tmp_path / "it")
    spoil(tmp_path / "it")
    with pytest.raises(CheckpointError, match=message) as caught:
        weft.load(tmp_path / "it", device="cpu")
    assert str(tmp_path) in str(caught.value), "the place is named"


def test_what_a_folder_is_said_to_be_takes_no_weights(folders, tmp_path):
    shutil.copytree(folders["gpt2"][0], tmp_path / "it")
    run, task, _ = load_hf(tmp_path / "it")
    reshape(tmp_path / "it")
    described, tokenizer = describe_hf(tmp_path / "it")
    assert (described, tokenizer.identity) == (run, task.tokenizer.identity)
    with pytest.raises(CheckpointError, match="must be"):
        load_hf(tmp_path / "it")


def test_what_is_no_such_folder(tmp_path):
    own().save(tmp_path / "own")
    assert not is_hf(tmp_path)
    assert not is_hf(tmp_path / "own")
    assert not is_hf(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="does not exist; looked for"):
        weft.load(tmp_path / "nowhere")


def test_a_map_that_splits_what_is_one_here_is_read_in_both_directions(folders, tmp_path, monkeypatch):
    """As in BERT, whose query, key and value are three modules."""
    pipeline = weft.load(folders["gpt2"][0], device="cpu")
    gpt2, other = FAMILIES["gpt"]
    parts = tuple(f"h.{{layer}}.attn.{name}" for name in ("query", "key", "value"))
    split = {**gpt2.modules, "decoder.blocks.{layer}.attention.in_proj": parts}
    changed = HFMapping(**{**vars(gpt2), "modules": split, "turned": (*gpt2.turned, "key")})
    monkeypatch.setitem(FAMILIES, "gpt", (changed, other))
    save_hf(tmp_path / "it", pipeline.run, pipeline.tokenizer, pipeline.head)
    tensors = load_file(tmp_path / "it" / "model.safetensors")
    rows = pipeline.head.body.decoder.blocks[1].attention.in_proj.weight.detach()
    assert torch.equal(tensors["transformer.h.1.attn.query.weight"], rows[:24])
    assert torch.equal(tensors["transformer.h.1.attn.key.weight"], rows[24:48].t())
    _, _, head = load_hf(tmp_path / "it")
    for name, value in head.state_dict().items():
        assert torch.equal(value, pipeline.head.state_dict()[name]), name
    assert family_for(pipeline.run) is changed
