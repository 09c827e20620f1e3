"""Import of ARPA files as checkpoints, and export of n-gram checkpoints as ARPA files."""

from pathlib import Path
from typing import Any, Protocol

from tokenizers import models

from weft.checkpoint import contents
from weft.checkpoint.atomic_io import temporary_in, wrap_os_errors
from weft.checkpoint.store import resolve_checkpoint, save_folder, verify_checkpoint
from weft.config.run import Run
from weft.config.schema import read_section
from weft.errors import CheckpointError, RoleError
from weft.formats.arpa_text import BOS, EOS, UNK, read_arpa, write_arpa
from weft.models.ngram.model import NGram
from weft.tasks.factory import build
from weft.tokenization.trainable import Tokenizer, Words, load_tokenizer


class PipelineLike(Protocol):
    """The attributes of a pipeline that the export needs."""

    @property
    def head(self) -> Any:
        """The head, with the model as its body."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the model."""


def export_arpa(source: str | Path | PipelineLike, path: str | Path) -> Path:
    """Write an n-gram model, given as a pipeline or a checkpoint, to a new ARPA file; .gz compresses it."""
    tokenizer, body = _load(Path(source)) if isinstance(source, str | Path) else (source.tokenizer, source.head.body)
    if not isinstance(body, NGram):
        raise RoleError(f"{path}: ARPA is a format of n-gram models, but the model is {body.config.name!r}")
    path = Path(path)
    if path.exists():
        raise CheckpointError(f"{path}: exists already; choose a new file")
    with wrap_os_errors(path, "cannot be written", "choose a new file where you may write"):
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = temporary_in(path.parent).with_suffix(path.suffix)
        try:
            write_arpa(body, arpa_tokens(tokenizer), partial)
            partial.rename(path)
        finally:
            partial.unlink(missing_ok=True)
    return path


def arpa_tokens(tokenizer: Tokenizer) -> list[str]:
    """Return the tokens by id, the special ones by their ARPA names."""
    specials = tokenizer.specials
    names = {specials.bos: BOS, specials.eos: EOS, specials.unk: UNK}
    return [names.get(id) or str(tokenizer.engine.id_to_token(id)) for id in range(len(tokenizer))]


def _load(path: Path) -> tuple[Tokenizer, Any]:
    folder = resolve_checkpoint(path)
    verify_checkpoint(folder)
    run = contents.read_saved_run(folder)
    tokenizer = load_tokenizer(run.tokenizer, folder)
    _, head = contents.load_head(run, tokenizer, folder)
    return tokenizer, head.body


def import_arpa(path: str | Path, folder: str | Path) -> Path:
    """Convert an ARPA file to a checkpoint that `weft.load` reads, in a new folder."""
    model, words = read_arpa(path)
    section = {"name": "words", "split": "whitespace", "size": max(len(words), 4)}
    recipe = {
        "task": {"name": "lm"},
        "data": {"train": Path(path).name},  # the training text is unknown
        "tokenizer": section,
        "model": model.config.model_dump(mode="json"),
        "train": {"steps": 1},
    }
    tokenizer = word_tokenizer(section, words)
    run = Run.parse(recipe)
    _, head = build(run, tokenizer)
    head.body.tables = model.tables
    return save_folder(Path(folder), 0, lambda new: contents.write_model(new, run, tokenizer, head))


def word_tokenizer(raw: dict[str, Any], words: list[str]) -> Words:
    """Return a tokenizer that splits at spaces, with these words as vocabulary, special tokens first."""
    config = read_section(Words.Config, raw, "tokenizer")
    engine = Words.fit(words[-1:], config)
    engine.model = models.WordLevel({word: id for id, word in enumerate(words)}, unk_token=UNK)
    return Words(config, engine)
