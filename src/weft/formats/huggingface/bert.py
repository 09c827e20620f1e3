"""BERT and its family as the Hugging Face format names them.

What the summary makes of a text's first token is there the body's own (BERT, ALBERT), or belongs to the head that
classifies (RoBERTa, DistilBERT, ELECTRA). What tells ELECTRA's true tokens from false ones is left out on reading, as
no task here has a use for it: such a model is read as a bare encoder.
"""

from weft.formats.huggingface.mapping import HFMap, Modules

_BLOCK = "encoder.blocks.{layer}"
_FIELDS: dict[str, str | tuple[str, ...]] = {
    "width": "hidden_size",
    "heads": "num_attention_heads",
    "layers": "num_hidden_layers",
    "hidden": "intermediate_size",
    "activation": "hidden_act",
    "dropout": "hidden_dropout_prob",
    "longest": "max_position_embeddings",
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
_MUST = {"position_embedding_type": "absolute", "is_decoder": False, "add_cross_attention": False}
_WORDS = {
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
_LAYER = "encoder.layer.{layer}"
_MODULES: Modules = {
    "embed": "embeddings.word_embeddings",
    "positions.table": "embeddings.position_embeddings",
    "segments": "embeddings.token_type_embeddings",
    "norm": "embeddings.LayerNorm",
    f"{_BLOCK}.attention.in_proj": tuple(f"{_LAYER}.attention.self.{part}" for part in ("query", "key", "value")),
    f"{_BLOCK}.attention.out_proj": f"{_LAYER}.attention.output.dense",
    f"{_BLOCK}.attention_residual.norm": f"{_LAYER}.attention.output.LayerNorm",
    f"{_BLOCK}.feed_forward.fc1": f"{_LAYER}.intermediate.dense",
    f"{_BLOCK}.feed_forward.fc2": f"{_LAYER}.output.dense",
    f"{_BLOCK}.feed_forward_residual.norm": f"{_LAYER}.output.LayerNorm",
}
_LABELS: dict[str, Modules] = {
    "classify": {"output": "classifier"},
    "choice": {"output": "classifier"},
    "tag": {"output": "classifier"},
    "span": {"output": "qa_outputs"},
}
_DENSE: Modules = {"body.pool": "classifier.dense", "output": "classifier.out_proj"}  # RoBERTa's head, and ELECTRA's


def _classes(family: str) -> dict[str, str]:
    """Name the classes that are read, with the head that each has here."""
    heads = {
        "ForMaskedLM": "mlm",
        "ForSequenceClassification": "classify",
        "ForTokenClassification": "tag",
        "ForQuestionAnswering": "span",
        "ForMultipleChoice": "choice",
        "Model": "embed",
    }
    return {family + name: head for name, head in heads.items()}


def _filling(transform: str, norm: str, output: str) -> Modules:
    return {"body.transform": transform, "body.transform_norm": norm, "body.output": output}


_BERT_FILLING = _filling(
    "cls.predictions.transform.dense", "cls.predictions.transform.LayerNorm", "cls.predictions.decoder"
)
BERT_MAP = HFMap(
    model_type="bert",
    tasks={**_classes("Bert"), "BertForPreTraining": "mlm.next"},
    own={"offset": 0, "shared": False, "embedding": None, "pooler": "tanh"},
    never={"segments": 0},
    fields=_FIELDS,
    defaults=_DEFAULTS,
    words={"activation": _WORDS},
    must=_MUST,
    also={"attention_probs_dropout_prob": 0.0},
    modules={**_MODULES, "pool": "pooler.dense"},
    outer={**_LABELS, "mlm": _BERT_FILLING, "mlm.next": {**_BERT_FILLING, "next": "cls.seq_relationship"}},
    prefix="bert.",
    copies={"cls.predictions.decoder.bias": "cls.predictions.bias"},
    unread=r"embeddings\.position_ids",
    vocabulary="wordpiece",
    specials=_SPECIALS,
    framed=True,
    kinds=True,
    dropout="classifier_dropout",
)

ROBERTA_MAP = HFMap(
    model_type="roberta",
    tasks=_classes("Roberta"),
    own={"shared": False, "embedding": None, "pooler": "tanh"},
    never={"segments": 0, "offset": 0},
    fields={**_FIELDS, "offset": "pad_token_id"},
    less={"offset": 1},  # positions are counted from the padding's number on
    defaults={**_DEFAULTS, "pad_token_id": 1},
    words={"activation": {"gelu": "gelu"}},  # what fills has no other
    must=_MUST,
    also={"attention_probs_dropout_prob": 0.0},
    modules={**_MODULES, "pool": "pooler.dense"},
    outer={**_LABELS, "classify": _DENSE, "mlm": _filling("lm_head.dense", "lm_head.layer_norm", "lm_head.decoder")},
    prefix="roberta.",
    copies={"lm_head.decoder.bias": "lm_head.bias"},
    unread=r"embeddings\.position_ids",
    vocabulary="byte-bpe",
    specials={
        "bos": ("cls_token", "<s>"),
        "eos": ("sep_token", "</s>"),
        "unk": ("unk_token", "<unk>"),
        "mask": ("mask_token", "<mask>"),
        "pad": ("pad_token", "<pad>"),
    },
    framed=True,
    gap=2,
    dropout="classifier_dropout",
)

_ALBERT_FILLING = _filling("predictions.dense", "predictions.LayerNorm", "predictions.decoder")
_GROUP = "encoder.albert_layer_groups.0.albert_layers.0"
ALBERT_MAP = HFMap(
    model_type="albert",
    tasks={**_classes("Albert"), "AlbertForPreTraining": "mlm.next"},
    own={"offset": 0, "shared": True, "pooler": "tanh"},
    never={"segments": 0, "embedding": None},
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
    words={"activation": _WORDS},
    must={**_MUST, "num_hidden_groups": 1, "inner_group_num": 1},
    also={"attention_probs_dropout_prob": 0.0},
    modules={
        **{ours: theirs for ours, theirs in _MODULES.items() if _BLOCK not in ours},
        "project": "encoder.embedding_hidden_mapping_in",
        f"{_BLOCK}.attention.in_proj": tuple(f"{_GROUP}.attention.{part}" for part in ("query", "key", "value")),
        f"{_BLOCK}.attention.out_proj": f"{_GROUP}.attention.dense",
        f"{_BLOCK}.attention_residual.norm": f"{_GROUP}.attention.LayerNorm",
        f"{_BLOCK}.feed_forward.fc1": f"{_GROUP}.ffn",
        f"{_BLOCK}.feed_forward.fc2": f"{_GROUP}.ffn_output",
        f"{_BLOCK}.feed_forward_residual.norm": f"{_GROUP}.full_layer_layer_norm",
        "pool": "pooler",
    },
    outer={
        **_LABELS,
        "mlm": _ALBERT_FILLING,
        "mlm.next": {**_ALBERT_FILLING, "next": "sop_classifier.classifier"},  # are sentences in their order?
    },
    prefix="albert.",
    copies={"predictions.decoder.bias": "predictions.bias"},
    unread=r"embeddings\.position_ids",
    vocabulary="sentencepiece",
    specials={**_SPECIALS, "unk": ("unk_token", "<unk>"), "pad": ("pad_token", "<pad>")},
    framed=True,
    kinds=True,
    dropout="classifier_dropout_prob",
)

_SUMMED: Modules = {"body.pool": "sequence_summary.summary", "output": "classifier"}
ELECTRA_MAP = HFMap(
    model_type="electra",
    tasks={**_classes("Electra"), "ElectraForPreTraining": "embed"},
    own={"offset": 0, "shared": False, "pooler": "gelu"},
    never={"segments": 0},
    fields={**_FIELDS, "embedding": "embedding_size"},
    unless={"embedding": "width"},
    defaults={
        **_DEFAULTS,
        "hidden_size": 256,
        "num_attention_heads": 4,
        "intermediate_size": 1024,
        "embedding_size": 128,
    },
    words={"activation": {"gelu": "gelu"}},  # what fills has no other
    must={**_MUST, "summary_type": "first", "summary_use_proj": True, "summary_activation": "gelu"},
    also={"attention_probs_dropout_prob": 0.0},
    modules={**_MODULES, "project": "embeddings_project"},
    outer={
        **_LABELS,
        "classify": _DENSE,
        "choice": _SUMMED,
        "mlm": _filling("generator_predictions.dense", "generator_predictions.LayerNorm", "generator_lm_head"),
    },
    prefix="electra.",
    unread=r"embeddings\.position_ids|discriminator_predictions\..*",
    vocabulary="wordpiece",
    specials=_SPECIALS,
    framed=True,
    kinds=True,
    dropout="classifier_dropout",
)

_DISTILLED = "transformer.layer.{layer}"
DISTILBERT_MAP = HFMap(
    model_type="distilbert",
    tasks=_classes("DistilBert"),
    own={"offset": 0, "segments": 0, "shared": False, "embedding": None, "pooler": "relu", "eps": 1e-12},
    fields={
        "width": "dim",
        "heads": "n_heads",
        "layers": "n_layers",
        "hidden": "hidden_dim",
        "activation": "activation",
        "dropout": "dropout",
        "longest": "max_position_embeddings",
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
    words={"activation": _WORDS},
    also={"attention_dropout": 0.0},
    modules={
        **{ours: theirs for ours, theirs in _MODULES.items() if _BLOCK not in ours and ours != "segments"},
        f"{_BLOCK}.attention.in_proj": tuple(f"{_DISTILLED}.attention.{part}_lin" for part in "qkv"),
        f"{_BLOCK}.attention.out_proj": f"{_DISTILLED}.attention.out_lin",
        f"{_BLOCK}.attention_residual.norm": f"{_DISTILLED}.sa_layer_norm",
        f"{_BLOCK}.feed_forward.fc1": f"{_DISTILLED}.ffn.lin1",
        f"{_BLOCK}.feed_forward.fc2": f"{_DISTILLED}.ffn.lin2",
        f"{_BLOCK}.feed_forward_residual.norm": f"{_DISTILLED}.output_layer_norm",
    },
    outer={
        **_LABELS,
        "classify": {"body.pool": "pre_classifier", "output": "classifier"},
        "choice": {"body.pool": "pre_classifier", "output": "classifier"},
        "mlm": _filling("vocab_transform", "vocab_layer_norm", "vocab_projector"),
    },
    prefix="distilbert.",
    unread=r"embeddings\.position_ids",
    vocabulary="wordpiece",
    specials=_SPECIALS,
    framed=True,
    dropout="seq_classif_dropout",
)

MAPS: tuple[HFMap, ...] = (BERT_MAP, DISTILBERT_MAP, ROBERTA_MAP, ALBERT_MAP, ELECTRA_MAP)
