"""`weft models NAME`: a trained model's card, a recipe or preset as YAML, the options of a model, task or section."""

import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer

from weft.cli.console import print_table, tell
from weft.config.json import write_json
from weft.errors import ConfigError, nearest

if TYPE_CHECKING:
    from pydantic import BaseModel

    from weft.registry import Kind


def show(name: str, as_json: bool = False) -> None:
    """Print what a name stands for: YAML, or a table of options with defaults, allowed values and meaning.

    A few names stand for two things: `gpt` is a model and, as a preset, the size of the first one.
    """
    from weft.config.recipes import expand_preset, preset_names, read_preset, read_recipe, recipe_names
    from weft.zoo import bundled_models, read_card

    in_recipes, in_presets = name in recipe_names(), name in preset_names()
    in_zoo = name in bundled_models() and not in_recipes  # `dates` is the recipe, which says all of the model
    if in_zoo:
        typer.echo(write_json({"card": read_card(name)}) if as_json else read_card(name), nl=as_json)
    if in_recipes:
        raw = read_recipe(name)
        _print_yaml("recipes", name, {**raw, "model": expand_preset(raw["model"])}, as_json)
    if in_presets:
        _print_yaml("presets", name, read_preset(name), as_json)
    if not (in_zoo or in_recipes or in_presets) or _kind_of(name):
        _print_options(name, as_json)


def _print_yaml(folder: Literal["recipes", "presets"], name: str, raw: dict[str, Any], as_json: bool) -> None:
    from weft.config.recipes import shipped_text

    text = f"# {folder.removesuffix('s')} {name}\n{shipped_text(folder, name)}"
    typer.echo(write_json(raw) if as_json else text, nl=as_json)


def _print_options(name: str, as_json: bool) -> None:
    from weft.config.options import Option, options_of

    place, about, schema = _find_schema(name)
    options = [option._replace(key=f"{place}.{option.key}") for option in options_of(schema)]
    if as_json:
        for option in options:
            typer.echo(write_json(option._asdict()))
        return
    print_table(list(Option._fields), [list(option) for option in options], title=about)


def _find_schema(name: str) -> tuple[str, str, type["BaseModel"]]:
    """Return the section that a name belongs to, a line about it, and the schema of its options."""
    from weft.config.sections import Data, Train
    from weft.registry import resolve

    if name in ("data", "train"):
        section: type[BaseModel] = Data if name == "data" else Train
        return name, f"the section {name} of a recipe: {_first_line(section)}", section
    kind = _kind_of(name)
    if kind is None:
        near = nearest(name, known_names())
        hint = f"did you mean {near!r}?" if near else "weft models lists all names"
        raise ConfigError(f"NAME: there is no recipe, preset, model, task, tokenizer or section {name!r}; {hint}")
    cls = resolve(kind, name)
    return kind, f"{kind} {name}: {_first_line(cls)}", cls.Config


def _kind_of(name: str) -> "Kind | None":
    """Return whether a name is that of a model, a task or a tokenizer; a user's own class is taken for a model."""
    from weft.registry import TABLE

    return "model" if ":" in name else next((kind for kind, table in TABLE.items() if name in table), None)


def _first_line(cls: Any) -> str:
    return (inspect.getdoc(cls) or "").partition("\n")[0]


def known_names() -> list[str]:
    """Return all names that `weft models` shows."""
    from weft.config.recipes import preset_names, recipe_names
    from weft.registry import TABLE
    from weft.zoo import bundled_models

    registered = [name for table in TABLE.values() for name in table]
    trained = [name for name in bundled_models() if name not in recipe_names()]
    return [*trained, *recipe_names(), *preset_names(), *registered, "data", "train"]


def copy_recipe(name: str | None, path: Path) -> None:
    """Write a recipe that ships with weft to a new file, with its comments."""
    from weft.config.recipes import recipe_names, shipped_text

    if name not in recipe_names():
        got = "no NAME is given" if name is None else f"{name!r} is none"
        near = nearest(name or "", recipe_names())
        hint = f"did you mean {near!r}?" if near else "weft models lists the recipes"
        raise ConfigError(f"--copy: writes a recipe that ships with weft, but {got}; {hint}")
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(shipped_text("recipes", name))
    except FileExistsError:
        raise ConfigError(f"--copy: {path} exists already; choose a new file") from None
    except OSError as error:
        raise ConfigError(f"--copy: {path} cannot be written: {error.strerror}") from None
    tell(f"{path}: a copy of {name}; change it, then weft train {path}")
