"""The registry of models, tasks and tokenizers: names to classes, as strings, so that only what is used is imported.

A user's own class is named `package.module:Class`, wherever a name may be.
"""

import importlib
from typing import Any, Literal

from weft.errors import ConfigError, did_you_mean

Kind = Literal["model", "task", "tokenizer"]

TABLE: dict[Kind, dict[str, str]] = {
    "model": {
        "bert": "weft.models.bert:BERT",
        "cnn": "weft.models.cnn:CNN",
        "context2vec": "weft.models.context2vec:Context2Vec",
        "elmo": "weft.models.elmo:ELMo",
        "fasttext": "weft.models.fasttext:FastText",
        "gpt": "weft.models.gpt:GPT",
        "ngram": "weft.models.ngram.model:NGram",
        "rnn": "weft.models.rnn:RNN",
        "seq2seq": "weft.models.seq2seq.model:Seq2Seq",
        "transformer": "weft.models.transformer:Transformer",
        "transformer-xl": "weft.models.transformer_xl:TransformerXL",
        "word2vec": "weft.models.word2vec.model:Word2Vec",
    },
    "task": {
        "choice": "weft.tasks.multiple_choice:Choice",
        "classify": "weft.tasks.classification.task:Classify",
        "complete": "weft.tasks.completion:Complete",
        "contrastive": "weft.tasks.contrastive:Contrastive",
        "electra": "weft.tasks.electra.task:Electra",
        "embed": "weft.tasks.feature_extraction:Embed",
        "lm": "weft.tasks.lm.task:LM",
        "mlm": "weft.tasks.mlm.task:MLM",
        "multitask": "weft.tasks.multitask:MultiTask",
        "skipgram": "weft.tasks.skipgram:Skipgram",
        "span": "weft.tasks.qa.task:Span",
        "tag": "weft.tasks.tagging:Tag",
        "translate": "weft.tasks.translate:Translate",
    },
    "tokenizer": {
        "words": "weft.tokenization.trainable:Words",
        "characters": "weft.tokenization.trainable:Characters",
        "bytes": "weft.tokenization.trainable:Bytes",
        "bpe": "weft.tokenization.trainable:BPE",
        "sentencepiece": "weft.tokenization.sentencepiece.marian:SentencePiece",
        "wordpiece": "weft.tokenization.trainable:WordPiece",
        "unigram": "weft.tokenization.trainable:Unigram",
    },
}


def names(kind: Kind) -> list[str]:
    """Return the names of weft's classes of one kind, sorted."""
    return sorted(TABLE[kind])


def resolve(kind: Kind, name: str, trust: bool = True) -> Any:
    """Import and return the class of a name in the table or, with `trust`, of any `package.module:Class`."""
    if name in TABLE[kind]:
        return _load(kind, name, TABLE[kind][name])
    if ":" not in name:
        raise ConfigError(f"{kind}.name: there is no {kind} {name!r}; {did_you_mean(name, TABLE[kind])}")
    if not trust:
        raise ConfigError(
            f"{kind}.name: {name!r} is code from outside weft, which a checkpoint may not run by itself; "
            "if you trust its author, load it with trust=True (command line: --trust)"
        )
    return _load(kind, name, name)


def _load(kind: Kind, name: str, path: str) -> Any:
    """Import the class at `package.module:Class`; errors name the `kind` and `name` of the recipe."""
    module, _, attribute = path.partition(":")
    if not all(part.isidentifier() for part in (*module.split("."), attribute)):
        raise ConfigError(f"{kind}.name: {name!r} must be a name, or package.module:Class")
    try:
        cls = getattr(importlib.import_module(module), attribute)
    except ModuleNotFoundError as error:
        if error.name is None or not (module == error.name or module.startswith(error.name + ".")):
            raise
        raise ConfigError(
            f"{kind}.name: {name!r}: there is no module {error.name!r}; is its folder on PYTHONPATH?"
        ) from error
    except AttributeError as error:
        public_names = (attr for attr in vars(importlib.import_module(module)) if not attr.startswith("_"))
        raise ConfigError(
            f"{kind}.name: {name!r}: module {module!r} has no {attribute!r}; {did_you_mean(attribute, public_names)}"
        ) from error
    if not hasattr(cls, "Config"):
        raise ConfigError(f"{kind}.name: {name!r} must be a class with a Config, but is {cls!r} instead")
    return cls
