"""Those that `translate.py` compares: transformers' Marian, CTranslate2 and weft, with one model's weights."""

import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

PAD, BOS, EOS, UNK = range(4)
VOCAB, WIDTH, HEADS, LAYERS, HIDDEN = 32_000, 512, 8, 6, 2048


class Workload(NamedTuple):
    """What is to be translated, and how."""

    sources: list[list[int]]
    length: int
    beam: int


class Setting(NamedTuple):
    """What a side is free to choose."""

    batch: int  # sentences
    how: str = ""

    def __str__(self) -> str:
        return f"batch {self.batch}" + (f", {self.how}" if self.how else "")


class Found(NamedTuple):
    """The best translation of a sentence."""

    ids: tuple[int, ...]
    logprob: float


class Side(Protocol):
    """One of those that are compared, in a process of its own."""

    def prepare(self, how: str) -> None:
        """Get ready for a setting."""

    def translate(self, work: Workload, setting: Setting) -> list[Found]:
        """Return the best translation of each source."""


def by_length(
    sources: Sequence[list[int]],
    size: int,
    translate: Callable[[list[list[int]]], list[Found]],
    over: Callable[..., Iterable[list[Found]]] = map,
) -> list[Found]:
    """Translate in batches of `size` sentences of like length; the results come in the sources' order."""
    order = sorted(range(len(sources)), key=lambda row: -len(sources[row]))
    batches = [order[start : start + size] for start in range(0, len(order), size)]
    made = over(translate, [[sources[row] for row in rows] for rows in batches])
    found = {row: one for rows, ones in zip(batches, made, strict=True) for row, one in zip(rows, ones, strict=True)}
    return [found[row] for row in range(len(sources))]


# --- transformers -----------------------------------------------------------------------------------------------------


def marian_config(vocab: int = VOCAB, layers: int = LAYERS) -> Any:
    """Describe Transformer-base as transformers' Marian classes do."""
    from transformers import MarianConfig

    sides = {"layers": layers, "attention_heads": HEADS, "ffn_dim": HIDDEN}
    return MarianConfig(
        **{f"{side}_{key}": value for side in ("encoder", "decoder") for key, value in sides.items()},
        vocab_size=vocab,
        d_model=WIDTH,
        activation_function="relu",
        scale_embedding=True,
        dropout=0.1,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
        decoder_start_token_id=BOS,
        forced_eos_token_id=None,
    )


def make_marian(seed: int) -> nn.Module:
    """Make the model with weights that let all tokens count, so that translations differ and do not repeat one word."""
    from transformers import MarianMTModel

    model = MarianMTModel(marian_config()).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "embed_positions" not in name:
                value.copy_(torch.randn(value.shape, generator=generator)).mul_(_scale(name, value.shape))
                value += value.sign() * ("norm.weight" in name)
    assert not model.final_logits_bias.any()
    return model


def _scale(name: str, shape: Sequence[int]) -> float:
    if len(shape) == 1:
        return 0.05
    if shape[0] == VOCAB:
        return WIDTH**-0.5
    gain = 3.0 if "q_proj" in name or "k_proj" in name else 0.7 if "fc" in name else 0.5
    return gain * (2 / sum(shape)) ** 0.5  # Xavier's, with a sharp look at little


class Marian:
    """transformers' own model and `generate`."""

    def __init__(self, folder: Path, device: str, precision: str) -> None:
        from transformers import MarianMTModel

        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
        self.model = MarianMTModel.from_pretrained(folder / "marian", dtype=dtype).to(device).eval()
        self.device = device

    def prepare(self, how: str) -> None:
        self.cache = how.removesuffix(" cache") if how else None

    def translate(self, work: Workload, setting: Setting) -> list[Found]:
        from weft.tasks.inference_batches import map_in_threads

        over = map_in_threads if self.device == "cpu" else map  # as `weft predict` does
        return by_length(work.sources, setting.batch, partial(self._batch, work), over)

    @torch.inference_mode()
    def _batch(self, work: Workload, sources: list[list[int]]) -> list[Found]:
        from transformers import GenerationConfig

        rows = [torch.tensor(ids) for ids in sources]
        ids = nn.utils.rnn.pad_sequence(rows, True, PAD)
        mask = torch.arange(ids.shape[1]) < torch.tensor([len(row) for row in rows])[:, None]
        config = GenerationConfig(
            num_beams=work.beam,
            do_sample=False,
            min_new_tokens=work.length,
            max_new_tokens=work.length,
            cache_implementation=self.cache,
            pad_token_id=PAD,
            bos_token_id=BOS,
            eos_token_id=EOS,
            decoder_start_token_id=BOS,
            return_dict_in_generate=work.beam > 1,
            output_scores=work.beam > 1,
        )
        ids, mask = ids.to(self.device), mask.long().to(self.device)
        out = self.model.generate(input_ids=ids, attention_mask=mask, generation_config=config)
        written = out.sequences if work.beam > 1 else out
        scores = (out.sequences_scores * work.length).tolist() if work.beam > 1 else [float("nan")] * len(rows)
        return [Found(tuple(row[1:]), score) for row, score in zip(written.tolist(), scores, strict=True)]


# --- CTranslate2 ------------------------------------------------------------------------------------------------------


def load_ctranslate2(folder: str) -> str:
    """Make the package importable; return its version."""
    sys.path.append(folder)
    try:
        import ctranslate2
    except ModuleNotFoundError as error:
        raise SystemExit(f"{error}: pip install --no-deps --target {folder} ctranslate2") from error
    return str(ctranslate2.__version__)


def convert(marian: nn.Module, folder: Path) -> None:
    """Write the model as CTranslate2 reads it.

    Its converter for Marian would start from a zero embedding and drop the last token; the one for BART, which it is
    made from, copies all as it is.
    """
    from ctranslate2.converters.transformers import BartLoader

    marian.config.normalize_before = marian.config.normalize_embedding = False
    loader = BartLoader()
    with torch.no_grad():
        spec = loader.get_model_spec(marian)
    loader.set_vocabulary(spec, ["<pad>", "<s>", "</s>", "<unk>", *map(str, range(UNK + 1, VOCAB))])
    spec.config.bos_token, spec.config.eos_token, spec.config.unk_token = "<s>", "</s>", "<unk>"
    spec.config.decoder_start_token = "<s>"
    spec.validate()
    spec.optimize()
    folder.mkdir()
    spec.save(str(folder))


class CTranslate2:
    """The C++ engine; it sorts and cuts into batches itself."""

    def __init__(self, folder: Path, package: str, precision: str) -> None:
        load_ctranslate2(package)
        self.folder, self.type = folder / "ctranslate2", {"fp32": "float32", "int8": "int8"}[precision]

    def prepare(self, how: str) -> None:
        import ctranslate2

        inter, intra = (int(part) for part in how.removesuffix(" threads").split(" x "))
        self.translator = ctranslate2.Translator(
            str(self.folder), compute_type=self.type, inter_threads=inter, intra_threads=intra
        )

    def translate(self, work: Workload, setting: Setting) -> list[Found]:
        names = [[str(id) if id > UNK else "</s>" for id in ids] for ids in work.sources]
        out = self.translator.translate_batch(
            names,
            beam_size=work.beam,
            min_decoding_length=work.length,
            max_decoding_length=work.length,
            max_batch_size=setting.batch,
            return_scores=True,
        )
        special = {"<pad>": PAD, "<s>": BOS, "</s>": EOS, "<unk>": UNK}
        found = []
        for one in out:
            ids = tuple(special[name] if name in special else int(name) for name in one.hypotheses[0])
            found.append(Found(ids, one.scores[0] * work.length))
        return found


# --- weft -------------------------------------------------------------------------------------------------------------


# weft's names for transformers' modules; several of the latter are one matrix here.
PARTS = {
    "attention.in_proj": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
    "attention.out_proj": ["self_attn.out_proj"],
    "attention_residual.norm": ["self_attn_layer_norm"],
    "cross_attention.in_proj": ["encoder_attn.q_proj"],
    "cross_attention.kv_proj": ["encoder_attn.k_proj", "encoder_attn.v_proj"],
    "cross_attention.out_proj": ["encoder_attn.out_proj"],
    "cross_attention_residual.norm": ["encoder_attn_layer_norm"],
    "feed_forward.fc1": ["fc1"],
    "feed_forward.fc2": ["fc2"],
    "feed_forward_residual.norm": ["final_layer_norm"],
}
# Of a position, Marian has all sines, then all cosines; in weft, as in the paper, they take turns: so does width.
TURNS = torch.arange(WIDTH).view(2, -1).T.flatten()


def from_marian(theirs: dict[str, Tensor], ours: dict[str, Tensor]) -> dict[str, Tensor]:
    """Name and order Marian's weights as weft does."""
    found = {}
    for name in ours:
        side, _, rest = name.partition(".blocks.")
        if not rest:
            found[name] = theirs["model.shared.weight"][:, TURNS]  # source, target and output have one matrix
            continue
        layer, _, part = rest.rpartition(".")[0].partition(".")
        kind = rest.rpartition(".")[2]
        value = torch.cat([theirs[f"model.{side}.layers.{layer}.{old}.{kind}"] for old in PARTS[part]])
        if not part.endswith(("in_proj", "kv_proj", "fc1")):  # it writes to the residual
            value = value[TURNS]
        elif kind == "weight":  # it reads from there
            value = value[:, TURNS]
        found[name] = value
    return found


class Weft:
    """weft's model and search."""

    def __init__(self, folder: Path, device: str, precision: str) -> None:
        from safetensors.torch import load_file

        from weft.models.transformer import Transformer, TransformerConfig
        from weft.nn.layers.quantization import lower

        config = TransformerConfig(name="transformer", width=WIDTH, heads=HEADS, layers=LAYERS, ffn_width=HIDDEN)
        model = Transformer(config, VOCAB)
        model.load_state_dict(from_marian(load_file(folder / "marian" / "model.safetensors"), model.state_dict()))
        self.model, self.device = model.to(device).eval(), device
        lower(self.model, precision)

    def prepare(self, how: str) -> None:
        pass

    def translate(self, work: Workload, setting: Setting) -> list[Found]:
        from weft.nn.layers.packed_linear import frozen_weights
        from weft.tasks.inference_batches import map_in_threads

        over = map_in_threads if self.device == "cpu" else map  # as `weft predict` does
        with frozen_weights():
            return by_length(work.sources, setting.batch, partial(self._batch, work), over)

    @torch.inference_mode()
    def _batch(self, work: Workload, sources: list[list[int]]) -> list[Found]:
        from weft.decoding.config import DecodingConfig
        from weft.decoding.generate import generate
        from weft.tokens import Tokens

        prompt = Tokens.pack([[BOS]] * len(sources)).to(self.device)
        options = DecodingConfig(beam=work.beam, min_length=work.length, max_length=work.length)
        found = generate(self.model, prompt, EOS, options, Tokens.pack(sources).to(self.device))
        return [Found(candidates[0].ids, candidates[0].logprob) for candidates in found]
