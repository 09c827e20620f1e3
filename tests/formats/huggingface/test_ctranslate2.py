"""CTranslate2's converter takes the directories that weft writes, and what it makes of them computes the same."""

import warnings

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests import bert_folders, hf_folders, marian_folders

import weft
from weft.formats.huggingface.folder import save_hf
from weft.tokens import Tokens

ctranslate2 = pytest.importorskip("ctranslate2")
TEXTS = ["The lambda expression", "x", "naïve café 東京 🙂, isn't it?"]
STEPS = 12


def convert(pipeline, folder):
    """Write a model of weft's as a Hugging Face directory, and that in CTranslate2's format; return the latter."""
    save_hf(folder / "hf", pipeline.run, pipeline.tokenizer, pipeline.head)
    with warnings.catch_warnings():  # of a package that Marian's tokenizer likes to have
        warnings.simplefilter("ignore")
        ctranslate2.converters.TransformersConverter(str(folder / "hf")).convert(str(folder / "ct2"))
    return str(folder / "ct2")


def names(tokenizer, ids):
    return [tokenizer.engine.id_to_token(id) for id in ids]


def test_a_gpt2_writes_the_same_text(tmp_path):
    hf_folders.gpt2(tmp_path / "given")
    pipeline = weft.load(tmp_path / "given", device="cpu")
    generator, tokenizer = ctranslate2.Generator(convert(pipeline, tmp_path)), pipeline.tokenizer
    answers = pipeline(TEXTS, {"beam": 1, "sample": False, "max_length": STEPS})
    prompts = [names(tokenizer, [tokenizer.specials.bos, *tokenizer.encode(text).ids]) for text in TEXTS]
    results = generator.generate_batch(prompts, max_length=STEPS, beam_size=1, include_prompt_in_result=False)
    assert [tokenizer.decode(result.sequences_ids[0]) for result in results] == [answer["text"] for answer in answers]
    assert len({answer["text"] for answer in answers}) == len(TEXTS)


def hidden_states(pipeline, encoder):
    """Return the last hidden states of texts by both: weft's without padding, the other's from one padded batch."""
    special = pipeline.tokenizer.specials
    tokens = Tokens.pack([[special.bos, *pipeline.tokenizer.encode(text).ids, special.eos] for text in TEXTS])
    padded = np.array(encoder.forward_batch([part.tolist() for part in tokens.split()]).last_hidden_state)
    with torch.no_grad():
        flat = pipeline.head.body.encode(tokens)[0]
    return flat.numpy(), np.concatenate([row[:size] for row, size in zip(padded, tokens.lengths, strict=True)])


@pytest.mark.parametrize("family", ["bert", "distilbert", "roberta"])
def test_an_encoder_has_the_same_hidden_states(tmp_path, family):
    bert_folders.make(tmp_path / "given", family, "ForSequenceClassification")
    pipeline = weft.load(tmp_path / "given", device="cpu")
    encoder = ctranslate2.Encoder(convert(pipeline, tmp_path))
    ours, theirs = hidden_states(pipeline, encoder)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-5)
    with torch.no_grad():  # the negative control
        pipeline.head.body.encoder.blocks[1].attention_residual.norm.bias[3] += 1e-3
    assert np.abs(hidden_states(pipeline, encoder)[0] - theirs).max() > 1e-4


def marian(folder, padding):
    """Return a Marian of weft's whose embedding of padding, the decoder's first input, is multiplied by `padding`."""
    marian_folders.marian(folder, search={"num_beams": 1, "forced_eos_token_id": None})
    tensors = load_file(folder / "model.safetensors")
    tensors["model.shared.weight"][-1] *= padding
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return weft.load(folder, device="cpu")


def translation_logits(pipeline, translator, text):
    """Return what each step of CTranslate2's greedy search saw, and weft's logits for the same tokens."""
    tokenizer = pipeline.tokenizer
    source = [*tokenizer.encode(text).ids, tokenizer.specials.eos]
    options = {"beam_size": 1, "min_decoding_length": 0, "max_decoding_length": STEPS}
    (result,) = translator.translate_batch([names(tokenizer, source)], return_logits_vocab=True, **options)
    ids = [tokenizer.target.engine.token_to_id(name) for name in result.hypotheses[0]]
    theirs = np.array([np.array(step) for step in result.logits[0]])
    with torch.no_grad():
        target = Tokens.pack([[tokenizer.target.specials.bos, *ids][: len(theirs)]])
        ours = pipeline.head.body.logits(target, Tokens.pack([source]))
    return ours[:, :-1].numpy(), theirs, tokenizer.target.decode(ids)  # it has no token for padding


def test_a_marian_translates_the_same(tmp_path):
    pipeline = marian(tmp_path / "given", padding=0)
    translator = ctranslate2.Translator(convert(pipeline, tmp_path))
    answers = pipeline(TEXTS, {"beam": 1, "max_length": STEPS})
    for text, answer in zip(TEXTS, answers, strict=True):
        ours, theirs, translation = translation_logits(pipeline, translator, text)
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-5)
        assert translation == answer["text"]


def test_a_marian_whose_decoder_begins_with_no_zeros_is_another_there(tmp_path):
    """CTranslate2 lets every Marian begin with zeros, as Opus-MT's do (docs/onnx.md); the negative control, too."""
    pipeline = marian(tmp_path / "given", padding=1)
    ours, theirs, _ = translation_logits(pipeline, ctranslate2.Translator(convert(pipeline, tmp_path)), TEXTS[0])
    assert np.abs(ours - theirs).max() > 1e-2
