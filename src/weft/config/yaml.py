"""YAML with the scalars of YAML 1.2, read safely: `no` is a word, `12:30` a string, `3e-5` a number."""

import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import yaml
from yaml.composer import Composer, ComposerError
from yaml.constructor import ConstructorError, SafeConstructor

from weft.errors import ConfigError

MAX_DEPTH = 64  # mappings and lists inside each other
MAX_ALIASED = 10_000  # values that aliases and merge keys stand for, in all
MAX_DIGITS = 64  # of an integer: more than any key can hold
_TAG = "tag:yaml.org,2002:"


class _Yaml12(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """A safe loader with YAML 1.2 scalars: `no` is a word, `12:30` is a string, `3e-5` is a number.

    libyaml parses, which takes a fifth of the time. Nodes are composed in Python: libyaml's own composer overflows the
    stack on deep nesting. Depth is bounded, and so is what aliases and merge keys expand to (a "billion laughs").
    """

    yaml_implicit_resolvers: dict[str, list[Any]] = {}  # noqa: RUF012  (as its base declares it)
    yaml_constructors: dict[str, Any] = {}  # noqa: RUF012

    get_single_node = Composer.get_single_node
    compose_document = Composer.compose_document
    compose_scalar_node = Composer.compose_scalar_node
    compose_sequence_node = Composer.compose_sequence_node
    compose_mapping_node = Composer.compose_mapping_node

    def __init__(self, text: str) -> None:
        super().__init__(text)
        Composer.__init__(self)
        self._depth = self._num_nodes = self._num_aliased = 0
        self._sizes: dict[str, int] = {}  # nodes under an anchor, aliases written out

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent):
            self._count_alias(event)
            return Composer.compose_node(self, parent, index)
        before, self._depth = self._num_nodes, self._depth + 1
        if self._depth > MAX_DEPTH:
            message = f"it is nested too deeply: more than {MAX_DEPTH} levels"
            raise ComposerError(None, None, message, event.start_mark)
        self._sizes.pop(event.anchor, None)
        node = Composer.compose_node(self, parent, index)
        self._depth, self._num_nodes = self._depth - 1, self._num_nodes + 1
        if event.anchor is not None:
            self._sizes[event.anchor] = self._num_nodes - before
        return node

    def _count_alias(self, event: Any) -> None:
        """Count the nodes that an alias stands for."""
        if event.anchor in self.anchors and event.anchor not in self._sizes:
            raise ComposerError(None, None, f"the alias *{event.anchor} is inside its own anchor", event.start_mark)
        size = self._sizes.get(event.anchor, 0)  # 0: an undefined alias, for which the composer has an error
        self._num_nodes += size
        self._num_aliased += size
        if self._num_aliased > MAX_ALIASED:
            message = f"its aliases stand for more than {MAX_ALIASED:,} values; write them out"
            raise ComposerError(None, None, message, event.start_mark)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys: set[object] = set()
        for key_node, _ in node.value if isinstance(node, yaml.MappingNode) else ():  # else: an error of the base
            if key_node.tag == f"{_TAG}merge":
                continue
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, str | int | float) and key in keys:
                raise ConstructorError(None, None, f"the key {key!r} is given twice", key_node.start_mark)
            keys.add(key) if isinstance(key, str | int | float) else None
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        return mapping

    def construct_typed(self, node: yaml.Node) -> Any:
        """Construct a bool, a null, an int or a float, whose tag may be explicit: `!!int x` is an error."""
        text, name = self.construct_scalar(node), node.tag.removeprefix(_TAG)
        if not re.fullmatch(_SCALARS[name][0], text):
            problem = f"must be of type {name}, but is {text[:60]!r} instead"
        elif name == "int" and len(text) > MAX_DIGITS:
            problem = f"an integer has at most {MAX_DIGITS} digits, but got {len(text):,}"
        else:
            return _READERS[name](text)
        raise ConstructorError(None, None, problem, node.start_mark)


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
_READERS: dict[str, Callable[[str], Any]] = {
    "bool": lambda text: text.lower() == "true",
    "null": lambda text: None,
    "int": lambda text: int(text, 0 if text[:2] in ("0x", "0o") else 10),
    "float": lambda text: float(text.lower().replace(".inf", "inf").replace(".nan", "nan")),
}
for _tag, (_pattern, _first) in _SCALARS.items():
    for _side in (_Yaml12, _Dumper):
        _side.add_implicit_resolver(f"{_TAG}{_tag}", re.compile(rf"^(?:{_pattern})$"), _first)
# The types of YAML 1.2 alone: the standard loader also reads dates, sets and binary data.
for _tag, _construct in {
    **dict.fromkeys(_READERS, _Yaml12.construct_typed),
    "str": SafeConstructor.construct_yaml_str,
    "seq": SafeConstructor.construct_yaml_seq,
    "map": SafeConstructor.construct_yaml_map,
}.items():
    _Yaml12.add_constructor(f"{_TAG}{_tag}", _construct)
_Yaml12.add_constructor(None, SafeConstructor.construct_undefined)


def read_yaml(text: str, name: str) -> Any:
    """Parse YAML; an error has the `name` of the file and the line."""
    try:
        return _Yaml12(text).get_single_data()
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ConfigError(f"{name}:{line}: not valid YAML: {error.problem}") from None
    except (yaml.YAMLError, UnicodeError) as error:
        raise ConfigError(f"{name}: not valid YAML: {' '.join(str(error).split())}") from None


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
