"""Models that ship with weft: ordinary checkpoints, each in a folder of its name, with a model card (README.md)."""

from pathlib import Path

ROOT = Path(__file__).parent


def bundled_models() -> list[str]:
    """Return the names of the models that ship with weft, sorted."""
    return sorted(path.parent.name for path in ROOT.glob("*/manifest.json"))


def find_bundled(name: str) -> Path | None:
    """Return the checkpoint of a model that ships with weft; None if no such model ships."""
    return ROOT / name if name in bundled_models() else None


def read_card(name: str) -> str:
    """Return the model card of a model that ships with weft, as Markdown."""
    return (ROOT / name / "README.md").read_text(encoding="utf-8")


def summary(name: str) -> str:
    """Return the first paragraph of a model card in a line."""
    return " ".join(read_card(name).split("\n\n")[1].split())
