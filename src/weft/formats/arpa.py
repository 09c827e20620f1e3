"""ARPA files to checkpoints, and n-gram checkpoints to ARPA files."""

from pathlib import Path
from typing import Any, Protocol

from tokenizers import models

from weft.checkpoint import contents
from weft.checkpoint.atomic_io import explained, temporary_in
from weft.checkpoint.store import resolve_checkpoint, save_folder, verify
from weft.config.schema import Run, read_section
from weft.errors import CheckpointError, RoleError
from weft.formats.arpa_text import BOS, EOS, UNK, read_arpa, write_arpa
from weft.models.ngram.model import NGram
from weft.tasks.factory import build
from weft.tokenization.trainable import Tokenizer, Words, load_tokenizer


class Trained(Protocol):
    """What a pipeline has."""

    @property
    def head(self) -> Any:
        """The trained unit, with the model as its body."""

    @property
    def tokenizer(self) -> Tokenizer:
        """How texts become ids."""


def export_arpa(source: str | Path | Trained, path: str | Path) -> Path:
    """Write an n-gram model, a pipeline or where one was saved, to a new ARPA file; .gz packs it."""
    tokenizer, body = _read(Path(source)) if isinstance(source, str | Path) else (source.tokenizer, source.head.body)
    if not isinstance(body, NGram):
        raise RoleError(f"{path}: ARPA is a format of n-gram models, but the model is {body.config.name!r}")
    path = Path(path)
    if path.exists():
        raise CheckpointError(f"{path}: exists already; choose a new file")
    with explained(path, "cannot be written", "choose a new file in a place that can be written"):
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = temporary_in(path.parent).with_suffix(path.suffix)
        try:
            write_arpa(body, spelt(tokenizer), partial)
            partial.rename(path)
        finally:
            partial.unlink(missing_ok=True)
    return path


def spelt(tokenizer: Tokenizer) -> list[str]:
    """List the tokens by id, the special ones as ARPA has them."""
    specials = tokenizer.specials
    names = {specials.bos: BOS, specials.eos: EOS, specials.unk: UNK}
    return [names.get(id) or str(tokenizer.engine.id_to_token(id)) for id in range(len(tokenizer))]


def _read(path: Path) -> tuple[Tokenizer, Any]:
    folder = resolve_checkpoint(path)
    verify(folder)
    run = contents.read_run(folder)
    tokenizer = load_tokenizer(run.tokenizer, folder)
    _, head = build(run, tokenizer)
    contents.load_weights(folder, head)
    return tokenizer, head.body


def import_arpa(path: str | Path, folder: str | Path) -> Path:
    """Read an ARPA file, and write a checkpoint that `weft.load` reads, in a new folder."""
    model, words = read_arpa(path)
    tokenizer = {"name": "words", "split": "spaces", "size": max(len(words), 4)}
    recipe = {
        "task": {"name": "lm"},
        "data": {"train": Path(path).name},  # nobody knows from what text it was made
        "tokenizer": tokenizer,
        "model": model.config.model_dump(mode="json"),
        "train": {"steps": 1},
    }
    known = words_of(tokenizer, words)
    run = Run.parse(recipe)
    _, head = build(run, known)
    head.body.tables = model.tables
    return save_folder(Path(folder), 0, lambda new: contents.write_model(new, run, known, head))


def words_of(raw: dict[str, Any], words: list[str]) -> Words:
    """Make a tokenizer that cuts at spaces, and has these words in this order, the special ones first."""
    config = read_section(Words.Config, raw, "tokenizer")
    engine = Words.fit(words[-1:], config)
    engine.model = models.WordLevel({word: id for id, word in enumerate(words)}, unk_token=UNK)
    return Words(config, engine)
