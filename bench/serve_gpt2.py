"""A GPT of GPT-2's size (124M) with random weights as a Hugging Face folder, and the rate of one search for a batch.

Its tokenizer has GPT-2's number of tokens: bytes, and others that never occur in a text. So a prompt has as many tokens
as letters, and what is generated is text of some kind.
"""

import json
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

VOCAB, WIDTH, LAYERS, POSITIONS = 50_257, 768, 12, 1024


def write_gpt2(folder: Path) -> Path:
    """Write the folder, and return it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    folder.mkdir()
    bytes_ = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: number for number, token in enumerate(bytes_)}
    vocab |= {f"Ġ{number:05d}": number for number in range(len(vocab), VOCAB - 1)} | {"<|endoftext|>": VOCAB - 1}
    engine = Tokenizer(models.BPE(vocab, []))
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    engine.decoder = decoders.ByteLevel()
    engine.add_special_tokens(["<|endoftext|>"])
    engine.save(str(folder / "tokenizer.json"))
    config = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "vocab_size": VOCAB, "n_embd": WIDTH}
    config |= {"n_layer": LAYERS, "n_head": 12, "n_positions": POSITIONS, "n_ctx": POSITIONS, "n_inner": None}
    config |= {"activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "bos_token_id": VOCAB - 1}
    config |= {"eos_token_id": VOCAB - 1, "tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps(config))
    special = dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>")
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer", **special}))
    save_file(weights(), folder / "model.safetensors", {"format": "pt"})
    return folder


def weights() -> dict[str, torch.Tensor]:
    """Return random weights of about the size that trained ones have, under GPT-2's names."""
    torch.manual_seed(0)
    shapes = {
        "wte.weight": (VOCAB, WIDTH),
        "wpe.weight": (POSITIONS, WIDTH),
        "ln_f.weight": (WIDTH,),
        "ln_f.bias": (WIDTH,),
    }
    for layer in range(LAYERS):
        sizes = {"attn.c_attn": (WIDTH, 3 * WIDTH), "attn.c_proj": (WIDTH, WIDTH)}
        sizes |= {"mlp.c_fc": (WIDTH, 4 * WIDTH), "mlp.c_proj": (4 * WIDTH, WIDTH)}
        for name, shape in sizes.items():
            shapes |= {f"h.{layer}.{name}.weight": shape, f"h.{layer}.{name}.bias": shape[1:]}
        shapes |= {f"h.{layer}.ln_{n}.{kind}": (WIDTH,) for n in (1, 2) for kind in ("weight", "bias")}
    values = {f"transformer.{name}": torch.randn(shape) * 0.05 for name, shape in shapes.items()}
    return {name: value + 1 if ".ln_" in name and name.endswith("weight") else value for name, value in values.items()}


def full_batch_rate(folder: Path, rows: int, length: int) -> float:
    """Return tokens/s of a search for so many prompts of one length, none of which ends early."""
    import weft
    from weft.decoding.config import DecodingConfig
    from weft.decoding.generate import generate
    from weft.tokens import Tokens

    body = weft.load(folder, "cuda", precision="bf16").head.body
    prompt = Tokens.pack([[VOCAB - 1, *range(number, number + 15)] for number in range(rows)]).to("cuda")
    options, seconds = DecodingConfig(max_length=length, min_length=length), []
    with torch.inference_mode():
        for _ in range(3):
            start = time.perf_counter()
            generate(body, prompt, VOCAB - 1, options)
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
    return rows * length / min(seconds)
