"""Changes to a recipe by dotted keys: `train.lr=3e-5`, or a mapping such as {"train.lr": 3e-5}."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from weft.config.yaml import read_yaml
from weft.errors import ConfigError, abbreviate

Overrides = str | Iterable[str] | Mapping[str, Any]  # key=value, one or several, or keys and their values


def apply_overrides(raw: dict[str, Any], overrides: Overrides) -> None:
    """Change a recipe in place by `key=value` strings, or by a mapping: {"train.lr": 3e-5} or {"train": {"lr": 3e-5}}.

    A dotted key replaces its value; nested mappings are merged with the recipe's own, key by key.
    """
    if isinstance(overrides, Mapping):
        for key, value in overrides.items():
            _apply_value(raw, key, value)
        return
    if not isinstance(overrides, Iterable):
        raise ConfigError(
            "overrides: must be a list, such as ['train.lr=3e-5'], or a mapping, such as {'train.lr': 3e-5}, "
            f"but is {abbreviate(overrides)} instead"
        )
    for override in [overrides] if isinstance(overrides, str) else overrides:
        apply_override(raw, override)


def apply_override(raw: dict[str, Any], override: str) -> None:
    """Set one dotted key in place: `train.lr=3e-5`, `model.layers=2`."""
    dotted, equals, text = override.partition("=") if isinstance(override, str) else ("", "", "")
    keys = dotted.split(".")
    if not equals or not all(keys):
        raise ConfigError(f"{abbreviate(override)}: an override is key=value, such as train.lr=3e-5")
    _parent_of(raw, keys, override)[keys[-1]] = read_yaml(text, override[:60])


def _apply_value(raw: dict[str, Any], dotted: object, value: Any) -> None:
    """Set one dotted key to a value; a section, whose key has no dot, is merged."""
    keys = dotted.split(".") if isinstance(dotted, str) else [""]
    if not all(keys):
        raise ConfigError(f"overrides: {abbreviate(dotted)}: a key is dotted, such as 'train.lr'")
    if len(keys) == 1 and isinstance(value, Mapping):
        _merge(raw, keys[0], value)
    else:
        _parent_of(raw, keys, dotted)[keys[-1]] = copy_mappings(value)


def _merge(raw: dict[str, Any], key: Any, value: Any) -> None:
    """Set a key; a mapping is merged with the one that is there."""
    if isinstance(value, Mapping) and isinstance(raw.get(key), dict):
        for inner, part in value.items():
            _merge(raw[key], inner, part)
    else:
        raw[key] = copy_mappings(value)


def _parent_of(raw: dict[str, Any], keys: Sequence[str], override: object) -> dict[str, Any]:
    """Return the mapping that holds the last of `keys`; make sections that are missing."""
    mapping = raw
    for depth, key in enumerate(keys[:-1]):
        mapping = mapping.setdefault(key, {})
        if not isinstance(mapping, dict):
            parent = ".".join(keys[: depth + 1])
            raise ConfigError(f"{abbreviate(override)}: {parent} is {abbreviate(mapping)}, which has no keys")
    return mapping


def copy_mappings(raw: Any) -> Any:
    """Return a copy of nested mappings, since an override must not change the caller's; a `Path` becomes a string."""
    if isinstance(raw, Mapping):
        return {key: copy_mappings(value) for key, value in raw.items()}
    return str(raw) if isinstance(raw, Path) else raw
