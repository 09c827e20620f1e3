"""Names to classes, by a static table of strings, so that nothing is imported before it is needed.

A user's own class goes by `package.module:Class` wherever a name goes, without touching weft.
"""

import importlib
from typing import Any, Literal

from weft.errors import ConfigError, did_you_mean

Kind = Literal["model", "task", "tokenizer"]

TABLE: dict[Kind, dict[str, str]] = {
    "model": {
        "bert": "weft.models.bert:BERT",
        "cnn": "weft.models.cnn:CNN",
        "elmo": "weft.models.elmo:ELMo",
        "gpt": "weft.models.gpt:GPT",
        "ngram": "weft.models.ngram.model:NGram",
        "rnn": "weft.models.rnn:RNN",
        "seq2seq": "weft.models.seq2seq.model:Seq2Seq",
        "transformer": "weft.models.transformer:Transformer",
        "word2vec": "weft.models.word2vec.model:Word2Vec",
    },
    "task": {
        "choice": "weft.tasks.multiple_choice:Choice",
        "classify": "weft.tasks.classification.task:Classify",
        "embed": "weft.tasks.feature_extraction:Embed",
        "lm": "weft.tasks.lm.task:LM",
        "mlm": "weft.tasks.mlm.task:MLM",
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
    """List the names that weft knows of one kind."""
    return sorted(TABLE[kind])


def resolve(kind: Kind, name: str, trust: bool = True) -> Any:
    """Import the class that `name` stands for: one of the table, or, with `trust`, any `package.module:Class`."""
    if name in TABLE[kind]:
        return _load(kind, name, TABLE[kind][name])
    if ":" not in name:
        raise ConfigError(f"{kind}.name: there is no {kind} {name!r}; {did_you_mean(name, TABLE[kind])}")
    if not trust:
        raise ConfigError(
            f"{kind}.name: {name!r} is code from outside weft, and a checkpoint does not get to run it by itself; "
            "if you trust its author, load it with trust=True (command line: --trust)"
        )
    return _load(kind, name, name)


def _load(kind: Kind, name: str, place: str) -> Any:
    module, _, attribute = place.partition(":")
    if not all(part.isidentifier() for part in (*module.split("."), attribute)):
        raise ConfigError(f"{kind}.name: {name!r} must be a name, or package.module:Class")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except ModuleNotFoundError as error:
        if error.name is None or not (module == error.name or module.startswith(error.name + ".")):
            raise
        raise ConfigError(
            f"{kind}.name: {name!r}: there is no module {error.name!r}; is its folder on PYTHONPATH?"
        ) from error
    except AttributeError as error:
        known = (attr for attr in vars(importlib.import_module(module)) if not attr.startswith("_"))
        raise ConfigError(
            f"{kind}.name: {name!r}: module {module!r} has no {attribute!r}; {did_you_mean(attribute, known)}"
        ) from error
    if not hasattr(found, "Config"):
        raise ConfigError(f"{kind}.name: {name!r} must be a class with a Config, but is {found!r} instead")
    return found
