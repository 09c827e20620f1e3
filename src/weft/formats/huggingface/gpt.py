"""Hugging Face mappings of GPT and GPT-2."""

from weft.formats.huggingface.mapping import HFMapping

_BLOCK = "decoder.blocks.{layer}"
_MODULES = {
    f"{_BLOCK}.attention_residual.norm": "h.{layer}.ln_1",
    f"{_BLOCK}.attention.in_proj": "h.{layer}.attn.c_attn",
    f"{_BLOCK}.attention.out_proj": "h.{layer}.attn.c_proj",
    f"{_BLOCK}.feed_forward_residual.norm": "h.{layer}.ln_2",
    f"{_BLOCK}.feed_forward.fc1": "h.{layer}.mlp.c_fc",
    f"{_BLOCK}.feed_forward.fc2": "h.{layer}.mlp.c_proj",
}
_FIELDS: dict[str, str | tuple[str, ...]] = {
    "width": "n_embd",
    "heads": "n_head",
    "layers": "n_layer",
    "max_positions": "n_positions",
    "dropout": ("resid_pdrop", "embd_pdrop"),
    "tie": "tie_word_embeddings",
}
_DEFAULTS = {"n_embd": 768, "n_head": 12, "n_layer": 12, "resid_pdrop": 0.1, "tie_word_embeddings": True}

GPT2_MAP = HFMapping(
    model_type="gpt2",
    architectures={"GPT2LMHeadModel": "lm", "GPT2Model": "lm"},
    fixed={"norm": "pre"},
    fields={**_FIELDS, "ffn_width": "n_inner", "activation": "activation_function"},
    defaults={**_DEFAULTS, "n_positions": 1024, "activation_function": "gelu_new"},
    values={
        "activation": {
            "gelu_new": "gelu-tanh",
            "gelu_pytorch_tanh": "gelu-tanh",
            "gelu": "gelu",
            "relu": "relu",
            "silu": "silu",
            "swish": "silu",
        }
    },
    required={"layer_norm_epsilon": 1e-5, "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False},
    write_only={"attn_pdrop": 0.0},
    modules={"embed": "wte", "positions.table": "wpe", **_MODULES, "decoder.norm": "ln_f"},
    head_modules={"lm": {"body.output": "lm_head"}},
    prefix="transformer.",
    turned=("c_attn", "c_proj", "c_fc"),
    ignored=r"h\.\d+\.attn\.(masked_)?bias",  # the causal mask
    vocab_format="byte-bpe",
    specials={"bos": ("bos_token", "<|endoftext|>"), "eos": ("eos_token", "<|endoftext|>")},
)

GPT_MAP = HFMapping(
    model_type="openai-gpt",
    architectures={"OpenAIGPTLMHeadModel": "lm", "OpenAIGPTModel": "lm"},
    fixed={"norm": "post"},
    fields={**_FIELDS, "activation": "afn"},
    defaults={**_DEFAULTS, "n_positions": 512, "afn": "gelu"},
    values={"activation": {"gelu": "gelu-tanh", "relu": "relu", "silu": "silu", "swish": "silu"}},
    required={"layer_norm_epsilon": 1e-5},
    write_only={"attn_pdrop": 0.0},
    modules={"embed": "tokens_embed", "positions.table": "positions_embed", **_MODULES},
    head_modules={"lm": {"body.output": "lm_head"}},
    prefix="transformer.",
    turned=("c_attn", "c_proj", "c_fc"),
    ignored=r"h\.\d+\.attn\.bias|position_ids",
    vocab_format="word-bpe",
    # It has no bos or eos token: the unknown token serves as both.
    specials={"bos": ("bos_token", "<unk>"), "eos": ("eos_token", "<unk>"), "unk": ("unk_token", "<unk>")},
)
