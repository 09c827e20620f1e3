"""Hugging Face mapping of the Transformer: Marian, the architecture of the Opus-MT models (Tiedemann 2020)."""

from weft.formats.huggingface.mapping import HFMapping, Modules


def _block(ours: str, theirs: str) -> Modules:
    """Return the mapping of self-attention and feed-forward, which encoder and decoder blocks share."""
    attention = f"{theirs}.self_attn"
    return {
        f"{ours}.attention.in_proj": tuple(f"{attention}.{part}_proj" for part in "qkv"),
        f"{ours}.attention.out_proj": f"{attention}.out_proj",
        f"{ours}.attention_residual.norm": f"{attention}_layer_norm",
        f"{ours}.feed_forward.fc1": f"{theirs}.fc1",
        f"{ours}.feed_forward.fc2": f"{theirs}.fc2",
        f"{ours}.feed_forward_residual.norm": f"{theirs}.final_layer_norm",
    }


_DECODER, _HF_DECODER = "decoder.blocks.{layer}", "decoder.layers.{layer}"

MARIAN_MAP = HFMapping(
    model_type="marian",
    architectures={"MarianMTModel": "translate"},
    fixed={"norm": "post", "positions": "halves", "tie": True, "bias": True, "copying": False},
    fields={
        "width": "d_model",
        "heads": ("encoder_attention_heads", "decoder_attention_heads"),
        "layers": ("encoder_layers", "num_hidden_layers"),
        "decoder_layers": "decoder_layers",
        "ffn_width": ("encoder_ffn_dim", "decoder_ffn_dim"),
        "activation": "activation_function",
        "dropout": "dropout",
        "max_positions": "max_position_embeddings",
    },
    defaults={
        "d_model": 1024,
        "encoder_attention_heads": 16,
        "encoder_layers": 12,
        "decoder_layers": 12,
        "encoder_ffn_dim": 4096,
        "activation_function": "gelu",
        "dropout": 0.1,
        "max_position_embeddings": 1024,
        "scale_embedding": False,
    },
    values={"activation": {"swish": "silu", "silu": "silu", "relu": "relu", "gelu": "gelu", "gelu_new": "gelu-tanh"}},
    same_as={"decoder_layers": "layers"},
    required={
        "scale_embedding": True,
        "share_encoder_decoder_embeddings": True,
        "tie_word_embeddings": True,
        "normalize_before": False,
        "normalize_embedding": False,
        "add_final_layer_norm": False,
        "static_position_embeddings": True,
    },
    write_only={"attention_dropout": 0.0, "activation_dropout": 0.0, "is_encoder_decoder": True},
    modules={
        "embed": "shared",
        **_block("encoder.blocks.{layer}", "encoder.layers.{layer}"),
        **_block(_DECODER, _HF_DECODER),
        f"{_DECODER}.cross_attention.in_proj": f"{_HF_DECODER}.encoder_attn.q_proj",
        f"{_DECODER}.cross_attention.kv_proj": tuple(f"{_HF_DECODER}.encoder_attn.{part}_proj" for part in "kv"),
        f"{_DECODER}.cross_attention.out_proj": f"{_HF_DECODER}.encoder_attn.out_proj",
        f"{_DECODER}.cross_attention_residual.norm": f"{_HF_DECODER}.encoder_attn_layer_norm",
    },
    head_modules={"translate": {"body.output": "final_logits"}},
    prefix="model.",
    tied_names={"final_logits.bias": "final_logits_bias"},
    row_vectors=("final_logits_bias",),
    # Sinusoidal positions, and copies of tied weights.
    ignored=r"(encoder|decoder)\.embed_(positions|tokens)\.weight|lm_head\.weight",
    vocab_format="marian",
    specials={"unk": ("unk_token", "<unk>"), "eos": ("eos_token", "</s>"), "pad": ("pad_token", "<pad>")},
)
