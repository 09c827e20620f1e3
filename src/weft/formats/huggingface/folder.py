"""Import and export of Hugging Face directories: config.json, model.safetensors, tokenizer.json.

A model's `HFMapping` has the names of its configuration and weights there; this module is independent of the model.
What a family has and ours lacks is an error, never ignored.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from weft.checkpoint.atomic_io import new_folder, wrap_os_errors
from weft.checkpoint.contents import copy_into_head, differences, run_with_overrides
from weft.checkpoint.manifest import CHECKPOINT_MANIFEST
from weft.config.overrides import Overrides
from weft.config.run import Run
from weft.config.schema import Named, read_section
from weft.errors import CheckpointError, ConfigError, did_you_mean
from weft.formats.huggingface.families import FAMILIES, MODEL_NAMES
from weft.formats.huggingface.heads import check_task, detect_head, head_name, read_task, write_task
from weft.formats.huggingface.mapping import HFMapping, WeightFiles
from weft.formats.huggingface.marian_tokenizer import read_marian, read_translation, write_marian, write_translation
from weft.formats.huggingface.tokenizer import read_json, read_tokenizer, write_json_object, write_tokenizer
from weft.formats.huggingface.weights import (
    find_weights,
    match_weights,
    read_hf_weights,
    write_hf_weights,
)
from weft.registry import resolve
from weft.tasks.base import Task
from weft.tasks.factory import build, build_on_meta
from weft.tasks.head import Head
from weft.tokenization.trainable import Tokenizer

_START = {"weights", "keep_layers"}  # what a model started from: not of its format
PAIR_KEYS = {"mlm.next": "task.next_sentence: this head", "mlm.order": "task.sentence_order: this head"}


def is_hf(folder: Path) -> bool:
    """Return whether this is a Hugging Face directory."""
    return (folder / "config.json").is_file() and not any(
        (folder / name).exists() for name in (CHECKPOINT_MANIFEST, "run.yaml")
    )


def load_hf(folder: Path, overrides: Overrides = ()) -> tuple[Run, Task, Head]:
    """Load a Hugging Face directory; nothing is written.

    Sizes of config.json are compared with the headers of the weights' files before anything is allocated.
    """
    run, tokenizer, family, weight_files = _describe(folder, overrides)
    with _config_errors(folder):
        on_meta = build_on_meta(run, tokenizer)
        sources = match_weights(folder, family, run, on_meta, weight_files)
        shapes = {ours: [part.on_meta_device() for part in parts] for ours, parts in sources.items()}
        copy_into_head(on_meta, read_hf_weights(shapes, family), folder)
        task, head = build(run, tokenizer)
    copy_into_head(head, read_hf_weights(sources, family), folder)
    return run, task, head


def describe_hf(folder: Path) -> tuple[Run, Tokenizer]:
    """Return recipe and tokenizer of a Hugging Face directory; of the weights, only the names are read."""
    run, tokenizer, _, _ = _describe(folder)
    return run, tokenizer


def _describe(folder: Path, overrides: Overrides = ()) -> tuple[Run, Tokenizer, HFMapping, WeightFiles]:
    config = read_json(folder / "config.json")
    family = _family_of(folder, config)
    section = _model_section(folder, family, config)
    model, weight_files = _parse_model(folder, section), find_weights(folder, family)
    head, vocab = detect_head(folder, family, config, weight_files), _vocab_size(folder, family, config, weight_files)
    tokenizer = (read_marian if _is_marian(family) else read_tokenizer)(folder, family, vocab)
    max_tokens = _max_text_tokens(family, model, head, tokenizer)
    options = read_translation(folder, config, tokenizer) if _is_marian(family) else _question_limit(head, max_tokens)
    raw = {
        "task": {**read_task(folder, family, head, config, weight_files), **options},
        # config.json has no other information on the data.
        "data": {"train": [], "max_length": max_tokens, "truncation": "window" if head == "span" else "error"},
        "tokenizer": tokenizer.config.model_dump(mode="json", exclude_none=True),
        "model": section,
        "train": {"steps": 1},
    }
    with _config_errors(folder):
        run = run_with_overrides(raw, folder, overrides=overrides)
    if run.tokenizer != tokenizer.config:  # by an override
        tokenizer = type(tokenizer)(run.tokenizer, tokenizer.engine)
    return run, tokenizer, family, weight_files


@contextmanager
def _config_errors(folder: Path) -> Iterator[None]:
    """Turn a `ConfigError` of the recipe into an error that names config.json."""
    try:
        yield
    except ConfigError as error:
        raise CheckpointError(f"{folder / 'config.json'}: {error}") from None


def _parse_model(folder: Path, section: Mapping[str, Any]) -> Named:
    """Validate the model's section."""
    with _config_errors(folder):
        model: Named = read_section(resolve("model", section["name"]).Config, section, "model")
        return model


def _max_text_tokens(family: HFMapping, model: Named, head: str, tokenizer: Tokenizer) -> int:
    """Return the maximum number of text tokens: positions, less those of the special tokens of a text or pair."""
    positions: int = getattr(model, "max_positions", 1024) - getattr(model, "offset", 0)
    specials_of_task = {"mlm": 0, "electra": 0, "embed": 2, "tag": 2}  # the first two include them
    num_specials = specials_of_task.get(head, 2 + len(tokenizer.pair_separator))
    return max(positions - num_specials, 1) if family.framed else positions - _is_marian(family)


def _is_marian(family: HFMapping) -> bool:
    """Return whether this is Marian, which has a source and a target tokenizer, and decoding options."""
    return family.vocab_format == "marian"


def _question_limit(head: str, max_tokens: int) -> dict[str, int]:
    """Return a limit on the question in a small model, so that half of the tokens are left for the passage."""
    return {"max_question_length": max(max_tokens // 2, 1)} if head == "span" and max_tokens < 128 else {}


def save_hf(folder: Path, run: Run, tokenizer: Tokenizer, head: Head) -> Path:
    """Write a model as a Hugging Face directory, which `transformers` loads by AutoModel and AutoTokenizer."""
    family = family_for(run)
    config, generation = _checked_config(family, run, tokenizer), _special_ids(tokenizer)
    if _is_marian(family):
        options, generation = write_translation(run, tokenizer)
        config |= options
    with wrap_os_errors(folder, "cannot be written", "choose a new folder where you may write"):
        if folder.exists():
            raise CheckpointError(f"{folder}: exists already; choose a new folder")
        folder.parent.mkdir(parents=True, exist_ok=True)
        with new_folder(folder) as temporary:
            write_json_object(temporary / "config.json", config)
            if not family.framed:  # a generator
                write_json_object(temporary / "generation_config.json", generation)
            max_positions = config[_first_key(family.fields["max_positions"])] - getattr(run.model, "offset", 0)
            (write_marian if _is_marian(family) else write_tokenizer)(temporary, tokenizer, family, max_positions)
            write_hf_weights(temporary, family, run, head)
    return folder


def family_for(run: Run) -> HFMapping:
    """Return the family that a model can be exported as."""
    families = _supporting_families(run)
    if not families:
        supported = ", ".join(sorted(FAMILIES))
        hint = "; n-grams go to a file that ends in .arpa" if run.model.name == "ngram" else ""
        raise CheckpointError(
            f"model.name: {run.model.name!r}, as configured, has no counterpart in the Hugging Face format; "
            f"{supported} have{hint}"
        )
    head = head_name(run)
    family = next((family for family in families if head in family.architectures.values()), None)
    if family is None:
        supported = ", ".join(sorted(set(families[0].architectures.values())))
        key = PAIR_KEYS.get(head, f"task.name: {run.task.name!r}")
        raise CheckpointError(f"{key} has no counterpart among the heads of {families[0].model_type}; {supported} has")
    return family


def closest_family(run: Run) -> HFMapping:
    """Return the family that a model is written as or, where it cannot represent all of it, the most similar one."""
    return (_supporting_families(run) or FAMILIES[run.model.name])[0]


def _supporting_families(run: Run) -> list[HFMapping]:
    """Return the families that can represent a model; they may lack its head."""
    return [family for family in FAMILIES.get(run.model.name, ()) if _supports(family, run)]


def class_for(run: Run) -> str:
    """Return the class name of a model in transformers."""
    return next(name for name, head in family_for(run).architectures.items() if head == head_name(run))


def _supports(family: HFMapping, run: Run) -> bool:
    """Return whether a family can represent a model."""
    unused = family.unused_fields.get(head_name(run), ())
    fixed = all(getattr(run.model, key) == value for key, value in family.fixed.items() if key not in unused)
    return fixed and all(getattr(run.model, key) != value for key, value in family.excluded.items())


def hf_config(family: HFMapping, run: Run, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return config.json, with as much of a model as a family can represent."""
    classes = [name for name, head in family.architectures.items() if head == head_name(run)]
    config: dict[str, Any] = {"architectures": classes[:1]} if classes else {}
    config |= {"model_type": family.model_type, "vocab_size": len(tokenizer)}
    config |= {"torch_dtype": "float32", **_special_ids(tokenizer), **write_task(family, run)}
    return config | {**_config_fields(family, _model_fields(family, run)), **family.required, **family.write_only}


def _model_fields(family: HFMapping, run: Run) -> dict[str, Any]:
    """Return the fields of a model; the source of its weights is not exported."""
    model: dict[str, Any] = run.model.model_dump(mode="json", exclude=_START)
    return model | {key: family.fixed[key] for key in family.unused_fields.get(head_name(run), ())}


def _checked_config(family: HFMapping, run: Run, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return config.json, and check that it reads back as the same configuration."""
    check_task(family, run)
    config, model = hf_config(family, run, tokenizer), _model_fields(family, run)
    _check_padding(family, config, tokenizer.specials.pad)
    read_back = resolve("model", run.model.name).Config(**_model_section(Path(), family, config))
    for key, (value, theirs) in differences(model, read_back.model_dump(mode="json", exclude=_START)).items():
        raise CheckpointError(
            f"model.{key}: {value!r} cannot be expressed in the format of {family.model_type}, where it is {theirs!r}; "
            "such a model cannot be exported"
        )
    return config


def _check_padding(family: HFMapping, config: Mapping[str, Any], pad: int | None) -> None:
    """Raise an error if positions would be counted differently there."""
    if config.get("pad_token_id") != pad:
        remedy = "" if pad is None else f"; train it with model.offset: {pad + 1}"
        raise CheckpointError(
            f"model.offset: a {family.model_type} counts positions from the id of its padding token, which must be "
            f"{config['pad_token_id']}, but is {pad} in this tokenizer{remedy}"
        )


def _config_fields(family: HFMapping, model: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a model's section by their keys in config.json."""
    config: dict[str, Any] = {}
    for ours, keys in family.fields.items():
        values, value = family.values.get(ours), model[ours]
        if values is not None:
            value = next((theirs for theirs in values if values[theirs] == value), None)
        if value is None and ours in family.same_as:
            value = model[family.same_as[ours]]
        value = value - family.offsets[ours] if ours in family.offsets else value
        config |= dict.fromkeys([keys] if isinstance(keys, str) else keys, value)
    return config


def _special_ids(tokenizer: Tokenizer) -> dict[str, int | None]:
    ids = {"bos": tokenizer.specials.bos, "eos": tokenizer.specials.eos, "pad": tokenizer.specials.pad}
    return {f"{role}_token_id": id for role, id in ids.items() if role != "pad" or id is not None}


def _family_of(folder: Path, config: Mapping[str, Any]) -> HFMapping:
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in MODEL_NAMES:
        raise CheckpointError(
            f"{folder / 'config.json'}: model_type is {repr(model_type)[:60]}, which weft does not read; "
            f"{did_you_mean(str(model_type)[:60], MODEL_NAMES)}"
        )
    return next(family for family in FAMILIES[MODEL_NAMES[model_type]] if family.model_type == model_type)


def _vocab_size(folder: Path, family: HFMapping, config: Mapping[str, Any], weight_files: WeightFiles) -> int:
    """Return the size of the vocabulary, by config.json and by the embeddings."""
    vocab = config.get("vocab_size")
    if type(vocab) is not int or vocab < 1:
        raise CheckpointError(
            f"{folder / 'config.json'}: vocab_size must be a number of tokens, but is {repr(vocab)[:60]}"
        )
    stored = weight_files.get(f"{family.modules['embed']}.weight")
    if stored is not None and (stored.value.ndim != 2 or len(stored.value) != vocab):
        raise CheckpointError(
            f"{folder / 'config.json'}: vocab_size is {vocab}, but the embeddings {stored.name} are "
            f"{tuple(stored.value.shape)}; are they of one model?"
        )
    return vocab


def _model_section(folder: Path, family: HFMapping, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the model's section of a recipe."""
    for key, supported in family.required.items():
        if (actual := config.get(key, family.defaults.get(key, supported))) != supported:
            raise CheckpointError(
                f"{folder / 'config.json'}: {key} is {repr(actual)[:60]}, but weft supports only {supported!r}"
            )
    section: dict[str, Any] = {"name": MODEL_NAMES[family.model_type], **family.fixed}
    for ours, keys in family.fields.items():
        key = _first_key(keys)
        value: Any = config.get(key) if config.get(key) is not None else family.defaults.get(key)
        values = family.values.get(ours)
        if values is not None and (not isinstance(value, str) or value not in values):
            raise CheckpointError(
                f"{folder / 'config.json'}: {key} is {repr(value)[:60]}, which weft does not support; "
                f"{did_you_mean(str(value)[:60], values)}"
            )
        if ours in family.offsets and type(value) is not int:
            raise CheckpointError(f"{folder / 'config.json'}: {key} must be a whole number, but is {repr(value)[:60]}")
        value = value + family.offsets[ours] if ours in family.offsets else value
        section |= {} if value is None else {ours: value if values is None else values[value]}
    for ours, other in family.same_as.items():
        section[ours] = None if section[ours] == section[other] else section[ours]
    return section


def _first_key(keys: str | tuple[str, ...]) -> str:
    return keys if isinstance(keys, str) else keys[0]
