"""A room imports only from rooms to its left; lazy imports count too."""

import ast
from pathlib import Path

import pytest

ROOMS = [
    {"errors"},
    {"registry", "yaml12", "explained"},
    {"config"},
    {"tokens"},
    {"text", "nn"},
    {"data"},
    {"models"},
    {"decode"},
    {"tasks"},
    {"features"},
    {"checkpoint"},
    {"training"},
    {"inspect"},
    {"pipeline"},
    {"estimators"},
    {"comparison"},
    {"translated"},
    {"testing", "feed", "console", "parity"},
    {"looking", "listing", "converting", "wordvectors", "featuring"},
    {"serve"},
    {"cli"},
    {"__main__"},
]
RANK = {room: rank for rank, rooms in enumerate(ROOMS) for room in rooms}
SOURCE = Path(__file__).parents[1] / "src" / "weft"


def room_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imported_rooms(tree: ast.AST) -> set[str]:
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "weft":
            parts = node.module.split(".")
            found |= {parts[1]} if len(parts) > 1 else {alias.name for alias in node.names if alias.name in RANK}
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("weft.")}
    return found


def wrong_imports(room: str, source: str) -> set[str]:
    return {other for other in imported_rooms(ast.parse(source)) if other != room and RANK[other] >= RANK[room]}


FILES = sorted(path for path in SOURCE.rglob("*.py") if path.name != "__init__.py" or path.parent != SOURCE)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_only_from_the_left(path):
    assert wrong_imports(room_of(path), path.read_text(encoding="utf-8")) == set()


def test_an_import_from_the_right_is_caught():
    assert wrong_imports("models", "def late():\n    from weft.tasks.base import Task\n") == {"tasks"}
    assert wrong_imports("text", "import weft.nn.grid") == {"nn"}
    assert wrong_imports("data", "from weft.errors import DataError") == set()


def test_no_pickle_and_no_unsafe_loading():
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            assert not {"pickle", "shelve", "dill", "marshal"} & set(names), path
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                assert ast.unparse(node.func) not in ("torch.load", "yaml.load", "yaml.unsafe_load"), path
