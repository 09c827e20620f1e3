"""A package imports only from packages to its left, in functions too; and nothing that is read can run code."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

LAYERS = [
    {"errors"},
    {"registry", "zoo"},
    {"config"},
    {"tokens", "jit", "ray_engine"},
    {"tokenization", "nn"},
    {"data"},
    {"models"},
    {"decoding"},
    {"tasks"},
    {"text_embedding"},
    {"checkpoint"},
    {"formats"},
    {"training"},
    {"analysis"},
    {"pipeline"},
    {"estimators", "comparison", "conversion", "testing", "vectors"},
    {"serve"},
    {"cli"},
    {"__main__"},
]
RANK = {package: rank for rank, layer in enumerate(LAYERS) for package in layer}
SOURCE = Path(__file__).parents[1] / "src" / "weft"


def package_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imported_packages(tree: ast.AST) -> set[str]:
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "weft":
            parts = node.module.split(".")
            found |= {parts[1]} if len(parts) > 1 else {alias.name for alias in node.names if alias.name in RANK}
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("weft.")}
    return found


def wrong_imports(package: str, source: str) -> set[str]:
    return {
        other for other in imported_packages(ast.parse(source)) if other != package and RANK[other] >= RANK[package]
    }


FILES = sorted(path for path in SOURCE.rglob("*.py") if path.name != "__init__.py" or path.parent != SOURCE)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_only_from_the_left(path):
    assert wrong_imports(package_of(path), path.read_text(encoding="utf-8")) == set()


def test_an_import_from_the_right_is_caught():
    assert wrong_imports("models", "def late():\n    from weft.tasks.base import Task\n") == {"tasks"}
    assert wrong_imports("tokenization", "import weft.nn.layers.crf") == {"nn"}
    assert wrong_imports("data", "from weft.errors import DataError") == set()


# What can run code as it is read: modules that are never named, and functions that are never referred to.
UNSAFE_MODULES = {"pickle", "_pickle", "cloudpickle", "dill", "joblib", "jsonpickle", "marshal", "shelve"}
UNSAFE_FUNCTIONS = {
    *("eval", "exec", "torch.load", "torch.hub", "torch.jit.load", "pandas.read_pickle"),
    *("yaml.load", "yaml.load_all", "yaml.full_load", "yaml.unsafe_load", "yaml.Loader", "yaml.UnsafeLoader"),
}
GENERATED = {
    "nn/rnn/fused/codegen_numba.py",
    "nn/rnn/fused/codegen_triton.py",
}  # these compile source code that weft has written itself


def full_names(tree: ast.AST) -> dict[str, str]:
    """Return what each imported name stands for: `l` for `torch.load` after `from torch import load as l`."""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.asname: alias.name for alias in node.names if alias.asname}
        if isinstance(node, ast.ImportFrom):
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return names


def references(tree: ast.AST) -> Iterator[str]:
    """Yield the full dotted name of everything that is imported or referred to."""
    names = full_names(tree)
    yield from names.values()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        if isinstance(node, ast.Name | ast.Attribute):
            first, *rest = ast.unparse(node).split(".")
            yield ".".join([names.get(first, first), *rest])


def unsafe(source: str) -> set[str]:
    """Return what in a module's source could run code that comes with data."""
    tree = ast.parse(source)
    found = {name for name in references(tree) if name in UNSAFE_FUNCTIONS or name.split(".")[0] in UNSAFE_MODULES}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and node.value in UNSAFE_MODULES:  # as `import_module` takes it
            found.add(node.value)
        if isinstance(node, ast.keyword) and node.arg == "allow_pickle" and ast.unparse(node.value) != "False":
            found.add("allow_pickle")
    return found


def test_no_pickle_and_no_unsafe_loading():
    sources = {path.relative_to(SOURCE).as_posix(): path.read_text(encoding="utf-8") for path in SOURCE.rglob("*.py")}
    found = {name: names for name, source in sources.items() if (names := unsafe(source))}
    assert found == {name: {"exec"} for name in GENERATED}


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("import pickle", "pickle"),
        ("import pickle as p\np.loads(data)", "pickle.loads"),
        ("from pickle import loads", "pickle.loads"),
        ("def late():\n    from joblib import load as read", "joblib.load"),
        ("__import__('pickle').loads(data)", "pickle"),
        ("importlib.import_module('dill')", "dill"),
        ("torch.load(path)", "torch.load"),
        ("import torch as t\nreader = t.load", "torch.load"),
        ("from torch import load\nload(path)", "torch.load"),
        ("torch.hub.load(name)", "torch.hub"),
        ("yaml.load(text, Loader=yaml.Loader)", "yaml.Loader"),
        ("np.load(path, allow_pickle=True)", "allow_pickle"),
        ("np.load(path, allow_pickle=trusted)", "allow_pickle"),
        ("eval(text)", "eval"),
        ("exec(text)", "exec"),
    ],
)
def test_unsafe_loading_is_caught(source, name):
    assert name in unsafe(source)


def test_what_only_looks_unsafe_is_not():
    assert (
        unsafe("model.eval()\nnp.load(path, allow_pickle=False)\nraise ValueError('a pickle')\nweft.load(path)")
        == set()
    )
