"""YAML with the scalars of YAML 1.2, read safely: `no` is a word, `12:30` a string, `3e-5` a number."""

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import yaml

from weft.errors import ConfigError


class _Yaml12(yaml.SafeLoader):
    """A safe loader with YAML 1.2 scalars: `no` is a word, `12:30` is a string, `3e-5` is a number."""

    yaml_implicit_resolvers: dict[str, list[Any]] = {}  # noqa: RUF012  (as its base declares it)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys: set[object] = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, str | int | float) and key in keys:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} is given twice", key_node.start_mark
                )
            keys.add(key) if isinstance(key, str | int | float) else None
        return super().construct_mapping(node, deep)


class _Dumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc]
    """A dumper that quotes every string that a YAML 1.1 or 1.2 reader would not read as a string."""


_SCALARS = {
    "bool": (r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    "null": (r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    "int": (r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", list("-+0123456789")),
    "float": (
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
    "merge": (r"<<", ["<"]),
}
for _tag, (_pattern, _first) in _SCALARS.items():
    for _side in (_Yaml12, _Dumper):
        _side.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"^(?:{_pattern})$"), _first)
_Yaml12.add_constructor(
    "tag:yaml.org,2002:int", lambda _, node: int(node.value, 0 if re.match(r"0[xo]", node.value) else 10)
)


def read_yaml(text: str, name: str) -> Any:
    """Parse YAML; an error has the `name` of the file and the line."""
    try:
        return _Yaml12(text).get_single_data()
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ConfigError(f"{name}:{line}: not valid YAML: {error.problem}") from None
    except (yaml.YAMLError, ValueError, AttributeError, TypeError) as error:
        raise ConfigError(f"{name}: not valid YAML: {error}") from None
    except RecursionError:
        raise ConfigError(f"{name}: not valid YAML: it is nested too deeply") from None


@lru_cache(maxsize=8)
def _read_back(text: str) -> Any:
    """Parse YAML that was just written; cached, as a run writes its recipe with each checkpoint."""
    return read_yaml(text, "")


def write_yaml(raw: Mapping[str, Any]) -> str:
    """Return plain data as YAML that `read_yaml` reads back as equal data."""
    text = yaml.dump(dict(raw), Dumper=_Dumper, sort_keys=False, allow_unicode=True)
    if _read_back(text) == raw:
        return text
    # A few characters, such as U+0085, survive only as escapes.
    return yaml.dump(dict(raw), Dumper=_Dumper, sort_keys=False)
