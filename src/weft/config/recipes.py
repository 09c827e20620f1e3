"""Recipes and presets by name or path, as plain data; `weft.config.run` checks them."""

from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from weft.config.overrides import Overrides, apply_overrides, copy_mappings
from weft.config.yaml import read_yaml
from weft.errors import ConfigError, abbreviate, did_you_mean, nearest

MAX_RECIPE = 1 << 25  # bytes: a recipe may list hundreds of thousands of labels


def read_recipe(recipe: str | Path | Mapping[str, Any], overrides: Overrides = ()) -> dict[str, Any]:
    """Return a recipe by its path or the name of one that ships with weft, with overrides applied."""
    if isinstance(recipe, Mapping):
        raw: Any = copy_mappings(recipe)
    else:
        raw = read_yaml(_recipe_text(recipe), str(recipe))
    if not isinstance(raw, dict):
        keys = "task, data, tokenizer, model, train"
        raise ConfigError(f"{recipe}: must be a mapping with the keys {keys}, but is {abbreviate(raw)}")
    apply_overrides(raw, overrides)
    return raw


def _recipe_text(recipe: str | Path) -> str:
    """Return the YAML of a file, or else of the recipe of that name."""
    path = Path(recipe)
    try:
        if not path.is_file() and str(recipe) in recipe_names():
            return shipped_text("recipes", str(recipe))
        with path.open("rb") as file:
            data = file.read(MAX_RECIPE + 1)
        if len(data) > MAX_RECIPE:
            raise ConfigError(f"{recipe}: has more than {MAX_RECIPE >> 20} MB; is it a recipe?")
        return data.decode("utf-8")
    except FileNotFoundError:
        near = _nearest_recipe(path)
        hint = f"did you mean {near!r}?" if near else "weft models lists those"
        raise ConfigError(f"{recipe}: neither a file nor a recipe that ships with weft; {hint}") from None
    except (OSError, ValueError) as error:  # also an invalid path, or text that is not UTF-8
        raise ConfigError(f"{str(recipe)[:200]!r}: cannot be read as a recipe: {error}") from None


def _nearest_recipe(path: Path) -> str | None:
    """Return the recipe whose name resembles a path's: a file of the same folder, or one that ships with weft."""
    files_there = path.parent.glob("*.y*ml") if path.parent.is_dir() else ()
    by_stem = {name: name for name in recipe_names()} | {file.stem: str(file) for file in files_there}
    near = nearest(path.stem, by_stem)  # by stems: "a.yaml" and "b.yaml" are not alike
    return None if near is None else by_stem[near]


def recipe_names() -> list[str]:
    """Return the names of the recipes that ship with weft."""
    return _shipped("recipes")


def expand_preset(model: Any) -> Any:
    """Return a model's section with its preset expanded; keys of the section itself override the preset's."""
    if not isinstance(model, Mapping) or "preset" not in model:
        return model
    own = {key: value for key, value in model.items() if key != "preset"}
    if model["preset"] is None:  # an override that removes a recipe's preset
        return own
    preset = read_preset(model["preset"])
    if own.get("name", preset["name"]) != preset["name"]:
        raise ConfigError(
            f"model.preset: {model['preset']!r} is a size of {preset['name']!r}, but model.name is {own['name']!r} "
            "instead; give a preset of that model, or leave one of the two out"
        )
    if preset.keys() <= own.keys():
        raise ConfigError(
            f"model.preset: the recipe sets every key of {model['preset']!r} itself, so it has no effect; leave it "
            "out, or give it as model={preset: ...}, without the other keys"
        )
    return {**preset, **own}


def read_preset(name: object) -> dict[str, Any]:
    """Return a preset: the section of a model, including its name."""
    if name not in preset_names():
        hint = did_you_mean(str(name), preset_names())
        raise ConfigError(f"model.preset: there is no preset {abbreviate(name)}; {hint}")
    preset: dict[str, Any] = read_yaml(shipped_text("presets", str(name)), f"presets/{name}.yaml")
    return preset


def preset_names() -> list[str]:
    """Return the names of the presets, the sizes of models that ship with weft."""
    return _shipped("presets")


def shipped_text(folder: Literal["recipes", "presets"], name: str) -> str:
    """Return the YAML of a recipe or a preset that ships with weft, with its comments."""
    return files("weft").joinpath(folder, f"{name}.yaml").read_text(encoding="utf-8")


def _shipped(folder: str) -> list[str]:
    return sorted(entry.name.removesuffix(".yaml") for entry in files("weft").joinpath(folder).iterdir())
