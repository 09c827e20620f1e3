"""The choice of the recipe that `weft init` writes: a starter by the task, the texts and the amount of data."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from weft.cli.data_check import DataCheck
from weft.config.starters import STARTERS, Sections, Starter, has_few_words

if TYPE_CHECKING:
    from weft.data.profile import ColumnProfile

VALIDATION_FRACTIONS = (0.1, 0.05, 0.02, 0.01, 0.005, 0.002, 0.001)
MIN_VALIDATION_ROWS = 2  # fewer say nothing
MAX_VALIDATION_ROWS = 4000  # more take time at each evaluation, and tell hardly more
LITTLE_TEXT = 20_000  # words in all, below which a language model reads characters
FEW_ROWS = 5000  # below which a pretrained model is advised
TRANSFORMER_ROWS = 20_000  # pairs from which a Transformer is better than a recurrent model, if there is a GPU
NAME_WORDS = 3  # sources of at most so many words, such as names to be spelt, are read by characters
CPU_SECONDS = 600  # of a training without a GPU, by the count of its FLOPs
FLOPS_PER_CORE = 4e10  # a second, in fp32: measured on the models of the starters
FEWEST_EPOCHS = 3  # with which a model must fit into CPU_SECONDS, else a smaller one is taken
FEWEST_ENCODER_EPOCHS = 0.3  # with which a pretrained encoder is better than a model from scratch
GPU_BATCH = 2  # a GPU reads batches so many times as large
MAX_LENGTH = 1024  # tokens: the default of data.max_length
ENCODER_LENGTH = 381  # tokens that the encoder reads at once: with what frames them 384, and it has 512 positions
TOKENS_PER_WORD = {"words": 1.3, "bpe": 2.0, "wordpiece": 1.6, "characters": 6.0}
USUAL_LENGTH = 32  # tokens
CHARACTERS = 200  # in the vocabulary of a tokenizer of characters, or so


@dataclass(frozen=True)
class DataSize:
    """The amount of training data, the lengths of its texts, and the machine, by which a starter is chosen."""

    rows: int
    words: float  # of a row, on average
    longest: int  # words
    long: int  # words of the row that 95 % are not longer than
    by_characters: bool  # few words a row, or none that spaces part
    gpu: bool
    cores: int  # that a training on the CPU uses
    english: bool = False


@dataclass(frozen=True)
class StarterRecipe:
    """The sections of a recipe but for where its data is, and a note on its model."""

    sections: Sections
    note: str
    advise_pretrained: bool  # whether a pretrained model is worth a hint


def validation_fraction(rows: int) -> float:
    """Return the share of the training rows to hold out: a tenth, and less of very many."""
    return next((part for part in VALIDATION_FRACTIONS if part * rows <= MAX_VALIDATION_ROWS), VALIDATION_FRACTIONS[-1])


def measure_data(check: DataCheck, gpu: bool, cores: int) -> DataSize:
    """Return the amount of training data and the lengths of its texts, with what is known of the machine."""
    texts = _text_columns(check)
    rows = check.profiles["train"].rows
    words = sum(length * times for column in texts for length, times in column.word_lengths.items()) / rows
    longest, long = sum(column.words.max for column in texts), sum(column.words.p95 for column in texts)
    by_characters = has_few_words(texts[0].words.median, texts[0].words.p95, texts[0].characters.median)
    english = all(column.is_english for column in texts)
    return DataSize(rows, words, longest, long, by_characters, gpu, cores, english)


def _text_columns(check: DataCheck) -> list["ColumnProfile"]:
    profile = check.profiles["train"]
    names = ("text", "pair", "words", "passage", "choices")
    inputs = {column for column, name in check.fields.items() if name in names}
    return [column for column in profile.columns if column.name in inputs] or profile.columns[:1]


def propose_recipe(check: DataCheck, size: DataSize) -> StarterRecipe:
    """Return the sections that fit the task and the amount of data, after the recipes that ship with weft."""
    task = str(check.task["name"])
    starter = STARTERS[_choose_starter(check, size)]
    gains = starter.pretrained or (task == "classify" and size.rows < FEW_ROWS and not size.by_characters)
    if gains and size.english and (adapted := _adapt_encoder(check.task, size)):
        return adapted
    sections, reduced = _fit_machine(starter, check.task, size)
    note = _with_time(starter.note, reduced)
    if task == "tag" and _has_entities(check):
        sections["task"]["crf"], note = True, _with_time(f"{starter.note}, with a CRF", reduced)
    sections["data"] |= {} if sections["data"] else _limits(size, task, sections["tokenizer"]["name"], MAX_LENGTH)
    return StarterRecipe(sections, note, gains)


def _adapt_encoder(task: Mapping[str, Any], size: DataSize) -> StarterRecipe | None:
    """Return a recipe that starts from the encoder that ships; None where the machine cannot train it long enough."""
    sections, reduced = _fit_machine(STARTERS["encoder"], task, size)
    if sections["train"]["epochs"] < FEWEST_ENCODER_EPOCHS:
        return None
    whole = STARTERS[str(task["name"])].sections.get("data")  # a passage is read in windows, however long it is
    sections["data"] |= whole or _limits(size, str(task["name"]), "wordpiece", ENCODER_LENGTH)
    return StarterRecipe(sections, _with_time(STARTERS["encoder"].note, reduced), advise_pretrained=False)


def _with_time(note: str, reduced: bool) -> str:
    return f"{note}; sized for {CPU_SECONDS // 60} minutes or so without a GPU" if reduced else note


def _choose_starter(check: DataCheck, size: DataSize) -> str:
    """Return the name of the starter for the task and its texts."""
    task = str(check.task["name"])
    if task == "classify" and size.by_characters:
        return "classify-characters"
    if task == "classify" and "pair" in check.fields.values():
        return "classify-pairs"
    if task == "translate" and size.long <= NAME_WORDS:
        return "translate-characters"
    if task == "translate" and size.gpu and size.rows >= TRANSFORMER_ROWS:
        return "translate-transformer"
    if task == "lm" and size.rows * size.words < LITTLE_TEXT:
        return "lm-characters"
    return task


def _fit_machine(starter: Starter, task: Mapping[str, Any], size: DataSize) -> tuple[Sections, bool]:
    """Return the sections for the amount of data and the machine, and whether they were reduced for lack of a GPU."""
    words = size.rows * size.words
    recipes = [
        {**sections, "task": {**task, **sections["task"]}}
        for sections in starter.recipes(words if task["name"] in ("lm", "mlm") else size.rows)
    ]
    if size.gpu:
        return {**recipes[0], "train": _for_gpu(recipes[0]["train"])}, False
    affordable = CPU_SECONDS * FLOPS_PER_CORE * size.cores
    epochs = [affordable / flops_per_epoch(sections, words) for sections in recipes]
    full = recipes[0]["train"]["epochs"]
    fitting = [number for number, count in enumerate(epochs) if count >= min(full, FEWEST_EPOCHS)]
    chosen = fitting[0] if fitting else epochs.index(max(epochs))
    if epochs[chosen] < full:
        fewer = int(epochs[chosen]) if epochs[chosen] >= FEWEST_EPOCHS else max(0.1, round(epochs[chosen], 1))
        recipes[chosen]["train"]["epochs"] = fewer
    return recipes[chosen], chosen > 0 or epochs[chosen] < full


def flops_per_epoch(sections: Sections, words: float) -> float:
    """Return the FLOPs of an epoch over so many words, by sequences of a usual length."""
    from weft.formats.pretrained import read_run
    from weft.models.base import Role
    from weft.tasks.factory import body_on_meta
    from weft.tokens import Tokens
    from weft.training.flops import PASSES

    run = read_run({**sections, "data": {**sections["data"], "train": "any", "validation_fraction": 0.1}})
    body = body_on_meta(run, getattr(run.tokenizer, "size", None) or CHARACTERS)
    tokens = Tokens.pack([range(USUAL_LENGTH)])
    source = tokens if Role.SEQ2SEQ in body.roles(run.model) else None
    per_token = PASSES * body.flops(tokens, source) / USUAL_LENGTH
    return max(1.0, per_token * words * TOKENS_PER_WORD[run.tokenizer.name])  # fasttext has no matrices


def _has_entities(check: DataCheck) -> bool:
    tags = next(column for column, name in check.fields.items() if name == "tags")
    return any(label.startswith("B-") for label in check.profiles["train"].column(tags).labels)


def _limits(size: DataSize, task: str, tokenizer: str, limit: int) -> dict[str, Any]:
    """Return the keys for sequences that may be longer than the limit, where there are any."""
    per_word = TOKENS_PER_WORD[tokenizer]
    if size.longest * per_word * 1.5 <= limit:
        return {}
    truncation = {"tag": "window", "translate": "drop"}.get(task, "cut")
    return {"max_length": min(limit, 64 * (int(size.long * per_word) // 64 + 1)), "truncation": truncation}


def _for_gpu(train: Mapping[str, Any]) -> dict[str, Any]:
    """Return the section with larger batches and bf16."""
    larger = {key: GPU_BATCH * train[key] for key in ("batch_size", "batch_tokens") if key in train}
    return {**train, **larger, "precision": "bf16"}
