"""Hugging Face mappings of BERT, RoBERTa, ALBERT, ELECTRA and DistilBERT.

The pooler over the first token belongs to the body there (BERT, ALBERT), or to the classification head (RoBERTa,
DistilBERT, ELECTRA). ELECTRA's discriminator and generator are two models there: of what was pre-trained here, the
discriminator is written.
"""

from collections.abc import Iterable
from dataclasses import replace

from weft.formats.huggingface.mapping import HFMapping, Modules

_FIELDS: dict[str, str | tuple[str, ...]] = {
    "width": "hidden_size",
    "heads": "num_attention_heads",
    "layers": "num_hidden_layers",
    "ffn_width": "intermediate_size",
    "activation": "hidden_act",
    "dropout": "hidden_dropout_prob",
    "max_positions": "max_position_embeddings",
    "segments": "type_vocab_size",
    "eps": "layer_norm_eps",
    "tie": "tie_word_embeddings",
}
_DEFAULTS = {
    "hidden_size": 768,
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "intermediate_size": 3072,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
    "tie_word_embeddings": True,
}
_REQUIRED = {"position_embedding_type": "absolute", "is_decoder": False, "add_cross_attention": False}
_ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu-tanh",
    "gelu_pytorch_tanh": "gelu-tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}
_SPECIALS = {
    "bos": ("cls_token", "[CLS]"),
    "eos": ("sep_token", "[SEP]"),
    "unk": ("unk_token", "[UNK]"),
    "mask": ("mask_token", "[MASK]"),
    "pad": ("pad_token", "[PAD]"),
}
_EMBEDDINGS: Modules = {
    "embed": "embeddings.word_embeddings",
    "positions.table": "embeddings.position_embeddings",
    "segments": "embeddings.token_type_embeddings",
    "norm": "embeddings.LayerNorm",
}
_BLOCK_MODULES = (
    "attention.out_proj",
    "attention_residual.norm",
    "feed_forward.fc1",
    "feed_forward.fc2",
    "feed_forward_residual.norm",
)


def _blocks(layer: str, query_key_value: Iterable[str], *modules: str) -> Modules:
    """Return the mapping of the blocks; the modules inside their `layer` are in the order of `_BLOCK_MODULES`."""
    theirs = dict(zip(_BLOCK_MODULES, modules, strict=True))
    return {
        "encoder.blocks.{layer}.attention.in_proj": tuple(f"{layer}.{part}" for part in query_key_value),
        **{f"encoder.blocks.{{layer}}.{name}": f"{layer}.{module}" for name, module in theirs.items()},
    }


_MODULES: Modules = {
    **_EMBEDDINGS,
    **_blocks(
        "encoder.layer.{layer}",
        (f"attention.self.{part}" for part in ("query", "key", "value")),
        "attention.output.dense",
        "attention.output.LayerNorm",
        "intermediate.dense",
        "output.dense",
        "output.LayerNorm",
    ),
}
_LABEL_HEADS: dict[str, Modules] = {
    "classify": {"output": "classifier"},
    "choice": {"output": "classifier"},
    "tag": {"output": "classifier"},
    "span": {"output": "qa_outputs"},
}
_DENSE_HEAD: Modules = {
    "body.pooler": "classifier.dense",
    "output": "classifier.out_proj",
}  # classification head of RoBERTa and ELECTRA


def _architectures(family: str) -> dict[str, str]:
    """Return the supported class names of a family, with our head for each."""
    heads = {
        "ForMaskedLM": "mlm",
        "ForSequenceClassification": "classify",
        "ForTokenClassification": "tag",
        "ForQuestionAnswering": "span",
        "ForMultipleChoice": "choice",
        "Model": "embed",
    }
    return {family + name: head for name, head in heads.items()}


def _mlm_head(transform: str, norm: str, output: str) -> Modules:
    return {"body.transform": transform, "body.transform_norm": norm, "body.output": output}


_BERT_MLM_HEAD = _mlm_head(
    "cls.predictions.transform.dense", "cls.predictions.transform.LayerNorm", "cls.predictions.decoder"
)
BERT_MAP = HFMapping(
    model_type="bert",
    architectures={**_architectures("Bert"), "BertForPreTraining": "mlm.next"},
    fixed={"offset": 0, "shared": False, "embedding": None, "pooler": "tanh"},
    excluded={"segments": 0},
    fields=_FIELDS,
    defaults=_DEFAULTS,
    values={"activation": _ACTIVATIONS},
    required=_REQUIRED,
    write_only={"attention_probs_dropout_prob": 0.0},
    modules={**_MODULES, "pooler": "pooler.dense"},
    head_modules={
        **_LABEL_HEADS,
        "mlm": _BERT_MLM_HEAD,
        "mlm.next": {**_BERT_MLM_HEAD, "next": "cls.seq_relationship"},
    },
    prefix="bert.",
    tied_names={"cls.predictions.decoder.bias": "cls.predictions.bias"},
    ignored=r"embeddings\.position_ids",
    vocab_format="wordpiece",
    specials=_SPECIALS,
    framed=True,
    token_types=True,
    dropout_key="classifier_dropout",
)

ROBERTA_MAP = replace(
    BERT_MAP,
    model_type="roberta",
    architectures=_architectures("Roberta"),
    fixed={"shared": False, "embedding": None, "pooler": "tanh"},
    excluded={"segments": 0, "offset": 0},
    fields={**_FIELDS, "offset": "pad_token_id"},
    offsets={"offset": 1},  # positions are counted from padding's id + 1
    defaults={**_DEFAULTS, "pad_token_id": 1},
    values={"activation": {"gelu": "gelu"}},  # its MLM head has no other
    head_modules={
        **_LABEL_HEADS,
        "classify": _DENSE_HEAD,
        "mlm": _mlm_head("lm_head.dense", "lm_head.layer_norm", "lm_head.decoder"),
    },
    prefix="roberta.",
    tied_names={"lm_head.decoder.bias": "lm_head.bias"},
    vocab_format="byte-bpe",
    specials={
        "bos": ("cls_token", "<s>"),
        "eos": ("sep_token", "</s>"),
        "unk": ("unk_token", "<unk>"),
        "mask": ("mask_token", "<mask>"),
        "pad": ("pad_token", "<pad>"),
    },
    num_separators=2,
    token_types=False,
)

_ALBERT_MLM_HEAD = _mlm_head("predictions.dense", "predictions.LayerNorm", "predictions.decoder")
ALBERT_MAP = replace(
    BERT_MAP,
    model_type="albert",
    architectures={**_architectures("Albert"), "AlbertForPreTraining": "mlm.order"},
    fixed={"offset": 0, "shared": True, "pooler": "tanh"},
    excluded={"segments": 0, "embedding": None},
    fields={**_FIELDS, "embedding": "embedding_size"},
    defaults={
        **_DEFAULTS,
        "hidden_size": 4096,
        "num_attention_heads": 64,
        "intermediate_size": 16384,
        "hidden_act": "gelu_new",
        "hidden_dropout_prob": 0.0,
        "embedding_size": 128,
    },
    required={**_REQUIRED, "num_hidden_groups": 1, "inner_group_num": 1},
    modules={
        **_EMBEDDINGS,
        "project": "encoder.embedding_hidden_mapping_in",
        **_blocks(
            "encoder.albert_layer_groups.0.albert_layers.0",
            (f"attention.{part}" for part in ("query", "key", "value")),
            "attention.dense",
            "attention.LayerNorm",
            "ffn",
            "ffn_output",
            "full_layer_layer_norm",
        ),
        "pooler": "pooler",
    },
    head_modules={
        **_LABEL_HEADS,
        "mlm": _ALBERT_MLM_HEAD,
        "mlm.order": {**_ALBERT_MLM_HEAD, "next": "sop_classifier.classifier"},
    },
    prefix="albert.",
    tied_names={"predictions.decoder.bias": "predictions.bias"},
    vocab_format="sentencepiece",
    specials={**_SPECIALS, "unk": ("unk_token", "<unk>"), "pad": ("pad_token", "<pad>")},
    dropout_key="classifier_dropout_prob",
)

_SUMMARY_HEAD: Modules = {"body.pooler": "sequence_summary.summary", "output": "classifier"}
ELECTRA_MAP = replace(
    BERT_MAP,
    model_type="electra",
    architectures={**_architectures("Electra"), "ElectraForPreTraining": "electra"},
    fixed={"offset": 0, "shared": False, "pooler": "gelu"},
    excluded={"segments": 0},
    fields={**_FIELDS, "embedding": "embedding_size"},
    same_as={"embedding": "width"},
    defaults={
        **_DEFAULTS,
        "hidden_size": 256,
        "num_attention_heads": 4,
        "intermediate_size": 1024,
        "embedding_size": 128,
    },
    values={"activation": {"gelu": "gelu"}},  # its MLM head has no other
    required={**_REQUIRED, "summary_type": "first", "summary_use_proj": True, "summary_activation": "gelu"},
    modules={**_MODULES, "project": "embeddings_project"},
    head_modules={
        **_LABEL_HEADS,
        "classify": _DENSE_HEAD,
        "choice": _SUMMARY_HEAD,
        "mlm": _mlm_head("generator_predictions.dense", "generator_predictions.LayerNorm", "generator_lm_head"),
        "electra": {"dense": "discriminator_predictions.dense", "output": "discriminator_predictions.dense_prediction"},
    },
    prefix="electra.",
    tied_names={},
    ignored=r"embeddings\.position_ids|discriminator_predictions\..*",
    not_written=r"generator\..*",
    unused_fields={"electra": ("pooler",)},
)

DISTILBERT_MAP = HFMapping(
    model_type="distilbert",
    architectures=_architectures("DistilBert"),
    fixed={"offset": 0, "segments": 0, "shared": False, "embedding": None, "pooler": "relu", "eps": 1e-12},
    fields={
        "width": "dim",
        "heads": "n_heads",
        "layers": "n_layers",
        "ffn_width": "hidden_dim",
        "activation": "activation",
        "dropout": "dropout",
        "max_positions": "max_position_embeddings",
        "tie": "tie_word_embeddings",
    },
    defaults={
        "dim": 768,
        "n_heads": 12,
        "n_layers": 6,
        "hidden_dim": 3072,
        "activation": "gelu",
        "dropout": 0.1,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
    },
    values={"activation": _ACTIVATIONS},
    write_only={"attention_dropout": 0.0},
    modules={
        **{ours: theirs for ours, theirs in _EMBEDDINGS.items() if ours != "segments"},
        **_blocks(
            "transformer.layer.{layer}",
            (f"attention.{part}_lin" for part in "qkv"),
            "attention.out_lin",
            "sa_layer_norm",
            "ffn.lin1",
            "ffn.lin2",
            "output_layer_norm",
        ),
    },
    head_modules={
        **_LABEL_HEADS,
        "classify": {"body.pooler": "pre_classifier", "output": "classifier"},
        "choice": {"body.pooler": "pre_classifier", "output": "classifier"},
        "mlm": _mlm_head("vocab_transform", "vocab_layer_norm", "vocab_projector"),
    },
    prefix="distilbert.",
    ignored=r"embeddings\.position_ids",
    vocab_format="wordpiece",
    specials=_SPECIALS,
    framed=True,
    dropout_key="seq_classif_dropout",
)

MAPS: tuple[HFMapping, ...] = (BERT_MAP, DISTILBERT_MAP, ROBERTA_MAP, ALBERT_MAP, ELECTRA_MAP)
