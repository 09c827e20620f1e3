"""GPT and GPT-2 as the Hugging Face format names them."""

from weft.formats.huggingface.mapping import HFMap

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
    "longest": "n_positions",
    "dropout": ("resid_pdrop", "embd_pdrop"),
    "tie": "tie_word_embeddings",
}
_DEFAULTS = {"n_embd": 768, "n_head": 12, "n_layer": 12, "resid_pdrop": 0.1, "tie_word_embeddings": True}

GPT2_MAP = HFMap(
    model_type="gpt2",
    tasks={"GPT2LMHeadModel": "lm", "GPT2Model": "lm"},
    own={"norm": "pre"},
    fields={**_FIELDS, "hidden": "n_inner", "activation": "activation_function"},
    defaults={**_DEFAULTS, "n_positions": 1024, "activation_function": "gelu_new"},
    words={
        "activation": {
            "gelu_new": "gelu-tanh",
            "gelu_pytorch_tanh": "gelu-tanh",
            "gelu": "gelu",
            "relu": "relu",
            "silu": "silu",
            "swish": "silu",
        }
    },
    must={"layer_norm_epsilon": 1e-5, "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False},
    also={"attn_pdrop": 0.0},
    modules={"embed": "wte", "positions.table": "wpe", **_MODULES, "decoder.norm": "ln_f"},
    outer={"lm": {"body.output": "lm_head"}},
    prefix="transformer.",
    turned=("c_attn", "c_proj", "c_fc"),
    unread=r"h\.\d+\.attn\.(masked_)?bias",  # the causal mask
    vocabulary="byte-bpe",
    specials={"bos": ("bos_token", "<|endoftext|>"), "eos": ("eos_token", "<|endoftext|>")},
)

GPT_MAP = HFMap(
    model_type="openai-gpt",
    tasks={"OpenAIGPTLMHeadModel": "lm", "OpenAIGPTModel": "lm"},
    own={"norm": "post"},
    fields={**_FIELDS, "activation": "afn"},
    defaults={**_DEFAULTS, "n_positions": 512, "afn": "gelu"},
    words={"activation": {"gelu": "gelu-tanh", "relu": "relu", "silu": "silu", "swish": "silu"}},
    must={"layer_norm_epsilon": 1e-5},
    also={"attn_pdrop": 0.0},
    modules={"embed": "tokens_embed", "positions.table": "positions_embed", **_MODULES},
    outer={"lm": {"body.output": "lm_head"}},
    prefix="transformer.",
    turned=("c_attn", "c_proj", "c_fc"),
    unread=r"h\.\d+\.attn\.bias|position_ids",
    vocabulary="word-bpe",
    # It has no sign for a text's beginning or end: what stands for the unknown must do.
    specials={"bos": ("bos_token", "<unk>"), "eos": ("eos_token", "<unk>"), "unk": ("unk_token", "<unk>")},
)
