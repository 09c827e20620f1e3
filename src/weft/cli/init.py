"""`weft init`: a first recipe for a data file, by what can be seen in it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weft.cli.console import OverridesArg
from weft.cli.data_check import DataCheck, check_data
from weft.errors import ConfigError

if TYPE_CHECKING:
    from weft.data.profile import ColumnProfile

_VALID_NAMES = ("valid", "val", "dev", "validation", "trial")
_MAX_LENGTH = 1024  # tokens: the default of data.max_length
_TOKENS_PER_WORD = {"words": 1.3, "bpe": 2.0, "wordpiece": 1.6, "characters": 6.0}
_BERT_NOTE = (
    "\n# A pretrained model does far better here: leave out tokenizer, and set lr: 1e-4 and"
    "\n# model: {name: bert, weights: A NAME ON THE HUB OR A FOLDER}"
)


@dataclass(frozen=True)
class DataSize:
    """What the choice of a model goes by."""

    rows: int
    words: float  # of a row, on average
    longest: int  # words
    long: int  # words of the row that 95 % are not longer than
    by_characters: bool  # few words a row, or none that spaces part
    gpu: bool


@dataclass(frozen=True)
class StarterRecipe:
    """The sections of a recipe, and a note on its model."""

    task: dict[str, Any]
    tokenizer: dict[str, Any]
    model: dict[str, Any]
    train: dict[str, Any]
    data: dict[str, Any]  # what is added to the data section
    note: str


def init(
    file: Annotated[str, typer.Argument(metavar="FILE", help="A data file or a pattern, to train on.")],
    overrides: OverridesArg = None,
    task: Annotated[
        str | None, typer.Option("--task", help="classify, tag, translate, lm or span; by the file if not given.")
    ] = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="The recipe to write; nothing is overwritten.")] = Path(
        "mine.yaml"
    ),
) -> None:
    """Write a first recipe for a data file: task, columns, tokenizer, model and training by what the file holds."""
    if out.exists():
        raise ConfigError(f"--out: {out} is there already; give another name with -o, or remove it")
    changes = [*_find_splits(file, overrides or []), *(overrides or [])]
    check = check_data(file, changes, task)
    recipe = propose_recipe(check, measure_data(check, _has_gpu()))
    text = write_recipe(file, check, recipe)
    _check_recipe(text)
    try:
        with out.open("x", encoding="utf-8") as stream:
            stream.write(text)
    except OSError as error:
        raise ConfigError(f"--out: {out} cannot be written: {error.strerror}") from None
    typer.echo(_next_commands(out, check))


def _find_splits(file: str, overrides: Sequence[str]) -> list[str]:
    """Return the validation and test data that lie beside train.csv as dev.csv and test.csv, as changes."""
    path, found = Path(file), []
    for split, names in (("valid", _VALID_NAMES), ("test", ("test",))):
        beside = [path.with_name(path.name.replace("train", name)) for name in names if "train" in path.name]
        given = any(override.startswith(f"data.{split}=") for override in overrides)
        found += [f"data.{split}={other}" for other in beside if other.is_file() and not given][:1]
    return found


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _text_columns(check: DataCheck) -> list["ColumnProfile"]:
    profile = check.profiles["train"]
    inputs = {column for column, field in check.fields.items() if field in ("text", "pair", "words", "passage")}
    return [column for column in profile.columns if column.name in inputs] or profile.columns[:1]


def measure_data(check: DataCheck, gpu: bool) -> DataSize:
    """Return what the choice of a model goes by."""
    texts = _text_columns(check)
    rows = check.profiles["train"].rows
    words = sum(length * times for column in texts for length, times in column.word_lengths.items()) / rows
    longest, long = sum(column.words.max for column in texts), sum(column.words.p95 for column in texts)
    unspaced = texts[0].characters.median > 15 * max(1, texts[0].words.median)
    return DataSize(rows, words, longest, long, texts[0].words.median <= 2 or unspaced, gpu)


def propose_recipe(check: DataCheck, size: DataSize) -> StarterRecipe:
    """Return the sections that fit the task and the size of the data, after the recipes that ship with weft."""
    choose = {"classify": _classify, "tag": _tag, "translate": _translate, "lm": _lm, "span": _span}
    return choose[check.task["name"]](check, size)


def _classify(check: DataCheck, size: DataSize) -> StarterRecipe:
    pair = "pair" in check.fields.values()
    width = 64 if size.rows < 2000 else 128 if size.rows < 20_000 else 300
    model: dict[str, Any] = {"name": "rnn", "cell": "lstm", "direction": "both", "width": width, "embedding": width}
    model["dropout"] = 0.1 if size.by_characters else 0.3
    tokenizer: dict[str, Any] = {"name": "words", "size": 20_000, "lowercase": True}
    note, lr = "a bidirectional LSTM over words, as in the recipe sst2", 2e-3
    if size.by_characters:
        tokenizer, lr = {"name": "characters"}, 5e-3
        note = "a bidirectional LSTM over characters, as in the recipe langid"
    elif size.words > 120 and not pair:
        model = {"name": "cnn", "width": 300, "kernels": [3, 4, 5], "embedding": 128}
        note, lr = "convolutions (Kim 2014): fast on long texts", 1e-3
    task = {**check.task, "dropout": 0.5 if tokenizer["name"] == "words" else 0.2}
    train = _train(check, size, tokenizer["name"], lr, "warmup-linear")
    note += _BERT_NOTE if pair or size.rows < 5000 else ""
    return StarterRecipe(task, tokenizer, model, train, _limits(size, tokenizer["name"], "cut"), note)


def _tag(check: DataCheck, size: DataSize) -> StarterRecipe:
    tags = next(column for column, field in check.fields.items() if field == "tags")
    entities = any(label.startswith("B-") for label in check.profiles["train"].column(tags).labels)
    tokenizer = {"name": "words", "size": 40_000, "min_count": 2 if size.rows > 1000 else 1, "lowercase": True}
    width = 100 if size.rows < 2000 else 200 if size.rows < 20_000 else 400
    model = {"name": "rnn", "cell": "lstm", "direction": "both", "width": width, "embedding": 100, "chars": 50}
    task = {**check.task, **({"crf": True} if entities else {}), "dropout": 0.5}
    note = f"a bidirectional LSTM over words and their characters{', with a CRF' if entities else ''}{_BERT_NOTE}"
    train = _train(check, size, "words", 4e-3, "warmup-linear")
    return StarterRecipe(task, tokenizer, {**model, "dropout": 0.3}, train, _limits(size, "words", "window"), note)


def _translate(check: DataCheck, size: DataSize) -> StarterRecipe:
    pieces = 500 if size.rows < 5000 else 2000 if size.rows < 20_000 else 8000
    tokenizer = {"name": "bpe", "size": pieces}
    limits = _limits(size, "bpe", "drop")
    if size.rows < 20_000:
        model: dict[str, Any] = {"name": "seq2seq", "width": 128 if size.rows < 5000 else 256, "attention": "additive"}
        train = _train(check, size, "bpe", 5e-3 if size.rows < 5000 else 2e-3, "warmup-linear")
        note = "a recurrent encoder-decoder with attention, as in the recipe dates"
        return StarterRecipe(check.task, tokenizer, model, train, limits, note)
    width, layers = (512, 3) if size.gpu else (256, 2)
    model = {"name": "transformer", "width": width, "heads": width // 64, "layers": layers, "ffn_width": 2 * width}
    train = _train(check, size, "bpe", 1e-3, "inverse-sqrt")
    note = "a small Transformer, as in the recipe multi30k-de-en"
    task = {**check.task, "label_smoothing": 0.1}
    return StarterRecipe(task, tokenizer, {**model, "norm": "pre", "dropout": 0.2}, train, limits, note)


def _lm(check: DataCheck, size: DataSize) -> StarterRecipe:
    total = size.rows * size.words
    limits: dict[str, Any] = {"max_length": 128, "truncation": "window"}
    if total < 20_000:
        model: dict[str, Any] = {"name": "rnn", "cell": "lstm", "width": 128, "dropout": 0.2}
        train = _train(check, size, "characters", 5e-3, "cosine")
        note = "an LSTM over characters: there is too little text for words"
        return StarterRecipe(check.task, {"name": "characters"}, model, train, limits, note)
    large = total > 1_000_000
    width, layers, pieces = (256, 6, 8000) if large else (128, 4, 2000)
    model = {"name": "gpt", "width": width, "heads": width // 32, "layers": layers, "max_positions": 256}
    train = _train(check, size, "bpe", 1e-3 if large else 2e-3, "cosine") | {"weight_decay": 0.1}
    note = "a small GPT, as in the recipe pydoc-gpt; model: {name: ngram} is the baseline to beat"
    return StarterRecipe(check.task, {"name": "bpe", "size": pieces}, {**model, "dropout": 0.15}, train, limits, note)


def _span(check: DataCheck, size: DataSize) -> StarterRecipe:
    tokenizer = {"name": "wordpiece", "size": 8000, "lowercase": True}
    train = _train(check, size, "wordpiece", 1e-3, "warmup-linear")
    limits = {"max_length": 381, "truncation": "window"}
    note = f"the smallest BERT, untrained: it shows that all works, no more{_BERT_NOTE}"
    return StarterRecipe(check.task, tokenizer, {"name": "bert", "preset": "bert-tiny"}, train, limits, note)


def _limits(size: DataSize, tokenizer: str, truncation: str) -> dict[str, Any]:
    """Return the keys for sequences that are longer than the default allows, where there are any."""
    per_word = _TOKENS_PER_WORD[tokenizer]
    if size.longest * per_word * 1.5 <= _MAX_LENGTH:
        return {}
    return {"max_length": min(_MAX_LENGTH, 64 * (int(size.long * per_word) // 64 + 1)), "truncation": truncation}


def _train(check: DataCheck, size: DataSize, tokenizer: str, lr: float, schedule: str) -> dict[str, Any]:
    """Return the budget: more passes over fewer rows, of 50 to 20,000 steps in all."""
    batch = (4096 if size.rows < 20_000 else 8192) * (2 if size.gpu else 1)
    epochs = 30 if size.rows < 2000 else 15 if size.rows < 20_000 else 6 if size.rows < 100_000 else 2
    steps = epochs * size.rows * size.words * _TOKENS_PER_WORD[tokenizer] / batch
    steps = 50 * round(min(20_000, max(100, steps)) / 50)
    train = {"steps": steps, "batch_tokens": batch, "lr": lr, "schedule": schedule, "warmup": max(10, steps // 15)}
    if size.gpu:
        train["precision"] = "bf16"
    return {**train, "eval_every": max(10, steps // 10)} if "valid" in check.profiles else train


def write_recipe(file: str, check: DataCheck, recipe: StarterRecipe) -> str:
    """Return the recipe as YAML, with comments."""
    from weft.data.proposal import flow_yaml, write_section

    profile = check.profiles["train"]
    described = f"{profile.layout.describe()}; {profile.rows:,} rows"
    odd = [f"# Odd: {warning}" for warning in profile.warnings()]
    unread = {"on_bad_rows": "skip"} if profile.skipped.count or check.unread else {}
    data = write_section("data", {**check.section, **recipe.data, **unread})
    if "valid" not in check.profiles:
        data += (
            "\n  # No validation data is given: the model of the last step is kept, and nothing says how good it is."
            "\n  # Put some rows into a file of their own, name it here, and set train.eval_every:"
            f"\n  # valid: {Path(file).with_stem('valid').name}"
        )
    return "\n".join(
        [
            f"# A first recipe for {file}, by weft init: {described}.",
            *odd,
            f"task: {flow_yaml(recipe.task)}",
            data,
            f"tokenizer: {flow_yaml(recipe.tokenizer)}",
            f"# {recipe.note[0].upper()}{recipe.note[1:]}",
            f"model: {flow_yaml(recipe.model)}",
            write_section("train", recipe.train),
            "",
        ]
    )


def _check_recipe(text: str) -> None:
    """Raise if a recipe is not valid: a fault of what was proposed, told before a file is written."""
    from weft.config.schema import Run
    from weft.config.yaml import read_yaml
    from weft.tasks.factory import make_task

    raw: Mapping[str, Any] = read_yaml(text, "the proposed recipe")
    make_task(Run.parse(raw))


def _next_commands(out: Path, check: DataCheck) -> str:
    run = Path("runs") / out.stem
    data = "" if {"valid", "test"} & set(check.profiles) else " FILE"
    question = {"span": '\'{"question": …, "passage": …}\''}.get(check.task["name"], "'A TEXT'")
    if "pair" in check.fields.values():
        question = '\'{"text": …, "pair": …}\''
    return "\n".join(
        [
            f"{out}: {check.task['name']}, {check.profiles['train'].rows:,} rows. Next:",
            f"  weft data show {out}",
            f"  weft train {out} --plan",
            f"  weft train {out}",
            f"  weft evaluate {run}{data}",
            f"  weft predict {run} {question}",
        ]
    )
