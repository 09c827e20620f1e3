"""The Transformer against transformers' MarianMTModel, with the same random weights, over a padded batch.

Marian lays the sines of a position in the first half of the width and its cosines in the second, where the paper turns
them about. So its width is ours in another order: every axis of a weight that is the width is taken by `HALVES`.
"""

import pytest
import torch
from tests.equations import weights_of
from tests.transformer_equations import spread_weights
from torch.nn.utils.rnn import pad_sequence

from weft.decoding.config import DecodingConfig
from weft.decoding.generate import generate
from weft.models.transformer import Transformer, TransformerConfig
from weft.nn.attention.capture import capture
from weft.tokens import Tokens

transformers = pytest.importorskip("transformers")

VOCAB, WIDTH, HEADS, LAYERS, DECODER_LAYERS, HIDDEN = 23, 16, 4, 2, 3, 40
PAD, EOS, BOS = 0, 1, 2
HALVES = torch.tensor([*range(0, WIDTH, 2), *range(1, WIDTH, 2)])
TARGETS, SOURCES = [6, 1, 19, 3], [4, 18, 1, 7]

# Marian's parts by ours; at the source, the keys and values are a matrix of their own.
NORMS = {
    "attention": "self_attn_layer_norm",
    "cross_attention": "encoder_attn_layer_norm",
    "feed_forward": "final_layer_norm",
}
SIZES = {"width": WIDTH, "heads": HEADS, "layers": LAYERS, "decoder_layers": DECODER_LAYERS, "ffn_width": HIDDEN}
ATTENTIONS = {"attention": ("self_attn", ["q", "k", "v"]), "cross_attention": ("encoder_attn", ["q"])}


def ours(seed=0, activation="relu"):
    config = TransformerConfig(name="transformer", **SIZES, activation=activation, dropout=0.0)
    torch.manual_seed(seed)
    model = Transformer(config, VOCAB)
    spread_weights(model, 0.3)
    return model


def block_of(w, here, there):
    """Return the weights of one block under Marian's names, with the width reordered by HALVES."""
    renamed = {}
    for kind in ("weight", "bias"):
        for part, norm in NORMS.items():
            if f"{here}.{part}_residual.norm.{kind}" in w:
                renamed[f"{there}.{norm}.{kind}"] = w[f"{here}.{part}_residual.norm.{kind}"][HALVES]
        for part, (attention_name, names) in ATTENTIONS.items():
            if f"{here}.{part}.in_proj.{kind}" in w:
                rows = w[f"{here}.{part}.in_proj.{kind}"].split(WIDTH)
                if part == "cross_attention":
                    rows, names = (*rows, *w[f"{here}.cross_attention.kv_proj.{kind}"].split(WIDTH)), ["q", "k", "v"]
                for name, value in zip(names, rows, strict=True):
                    renamed[f"{there}.{attention_name}.{name}_proj.{kind}"] = (
                        value[:, HALVES] if kind == "weight" else value
                    )
                renamed[f"{there}.{attention_name}.out_proj.{kind}"] = w[f"{here}.{part}.out_proj.{kind}"][HALVES]
    renamed[f"{there}.fc1.weight"] = w[f"{here}.feed_forward.fc1.weight"][:, HALVES]
    renamed[f"{there}.fc1.bias"] = w[f"{here}.feed_forward.fc1.bias"]
    for kind in ("weight", "bias"):
        renamed[f"{there}.fc2.{kind}"] = w[f"{here}.feed_forward.fc2.{kind}"][HALVES]
    return renamed


def as_marian(w):
    """Return all our weights, or their gradients, under Marian's names."""
    renamed = {"model.shared.weight": w["embed.weight"][:, HALVES]}
    for side, layers in (("encoder", LAYERS), ("decoder", DECODER_LAYERS)):
        for layer in range(layers):
            renamed |= block_of(w, f"{side}.blocks.{layer}", f"model.{side}.layers.{layer}")
    return renamed


def theirs(model, activation="relu"):
    config = transformers.MarianConfig(
        vocab_size=VOCAB,
        d_model=WIDTH,
        encoder_layers=LAYERS,
        decoder_layers=DECODER_LAYERS,
        encoder_attention_heads=HEADS,
        decoder_attention_heads=HEADS,
        encoder_ffn_dim=HIDDEN,
        decoder_ffn_dim=HIDDEN,
        activation_function=activation,
        dropout=0.0,
        scale_embedding=True,
        max_position_embeddings=64,
        pad_token_id=PAD,
        eos_token_id=EOS,
        bos_token_id=BOS,
        decoder_start_token_id=BOS,
        forced_eos_token_id=None,
        attn_implementation="eager",  # the one that says where it looks
    )
    marian = transformers.MarianMTModel(config).eval()
    own, given = dict(marian.named_parameters()), as_marian(weights_of(model))
    assert {name for name in own if "embed_positions" not in name} == set(given)
    with torch.no_grad():
        for name, value in given.items():
            own[name].copy_(value)
    assert not marian.final_logits_bias.any()
    return marian


def texts(seed=3):
    torch.manual_seed(seed)
    return [
        Tokens.flat(torch.randint(3, VOCAB, (sum(lengths),)), torch.tensor(lengths)) for lengths in (TARGETS, SOURCES)
    ]


def padded(tokens):
    wide = pad_sequence(tokens.split(), batch_first=True, padding_value=PAD)
    return wide, (torch.arange(tokens.longest) < tokens.lengths[:, None]).long()


def read_by_marian(marian, tokens, source):
    (read, real), (given, source_mask) = padded(tokens), padded(source)
    return marian(
        input_ids=given,
        attention_mask=source_mask,
        decoder_input_ids=read,
        decoder_attention_mask=real,
        use_cache=False,
        output_attentions=True,
    ), real.bool()


def check_outputs(model, marian):
    tokens, source = texts()
    actual, (output, real) = model.logits(tokens, source), read_by_marian(marian, tokens, source)
    expected = output.logits[real]
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    return actual, expected


@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_logits_and_gradients_are_marians(activation):
    model = ours(activation=activation)
    marian = theirs(model, activation)
    actual, expected = check_outputs(model, marian)
    weigh, names = torch.randn_like(expected), [name for name, _ in model.named_parameters()]
    mine = torch.autograd.grad((actual * weigh).sum(), list(model.parameters()))
    (expected * weigh).sum().backward()
    own = dict(marian.named_parameters())
    for name, value in as_marian(dict(zip(names, mine, strict=True))).items():
        torch.testing.assert_close(
            value, own[name].grad, rtol=1e-4, atol=1e-4, msg=lambda message, n=name: f"{n}: {message}"
        )


def test_another_activation_or_order_of_the_width_is_caught():
    """The negative control."""
    model = ours()
    with pytest.raises(AssertionError, match="not close"):
        check_outputs(model, theirs(model, "gelu"))
    marian = theirs(model)
    with torch.no_grad():
        marian.model.shared.weight.copy_(model.embed.weight)
    with pytest.raises(AssertionError, match="not close"):
        check_outputs(model, marian)


@torch.no_grad()
def test_it_looks_where_marian_looks():
    model, (tokens, source) = ours(), texts()
    with capture() as maps:
        model.logits(tokens, source)
    output, real = read_by_marian(theirs(model), tokens, source)
    source_mask = padded(source)[1].bool()
    places = {
        "encoder": (output.encoder_attentions, source_mask, LAYERS),
        "decoder": (output.decoder_attentions, real, DECODER_LAYERS),
        "cross": (output.cross_attentions, real, DECODER_LAYERS),
    }
    for place, (expected, queries, layers) in places.items():
        for layer in range(layers):
            (weights,) = maps.weights[place, layer]
            # Marian lets a place past the end look too.
            torch.testing.assert_close(weights, expected[layer] * queries[:, None, :, None], rtol=0, atol=1e-5)


@torch.no_grad()
def test_greedy_generation_is_marians_step_by_step():
    model, (_, source) = ours(), texts()
    model.eval()
    given, source_mask = padded(source)
    generated = theirs(model).generate(
        input_ids=given,
        attention_mask=source_mask,
        max_new_tokens=12,
        num_beams=1,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
    )
    prompt = Tokens.pack([[BOS]] * len(source))
    ours_found = generate(model, prompt, EOS, DecodingConfig(max_length=12), source)
    read = generated.sequences[:, 1:].tolist()
    ended = [row[: row.index(EOS)] if EOS in row else row for row in read]
    assert [list(candidates[0].ids) for candidates in ours_found] == ended
    assert any(EOS in row for row in read)
    assert len(set(map(tuple, ended))) > 1
    logits, state = model.start(prompt, source)
    for step, expected in enumerate(generated.logits):
        live = torch.tensor([EOS not in row[:step] for row in read])  # after its end, a row is filled with padding
        torch.testing.assert_close(logits[live], expected[live], rtol=1e-5, atol=1e-5)
        logits, state = model.step(generated.sequences[:, step + 1], state)
