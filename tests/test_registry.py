"""Names to classes: all of the table, a user's own, and mistakes with their remedy."""

import sys

import pytest

from weft.config.schema import Named
from weft.errors import ConfigError
from weft.models.base import Model
from weft.registry import TABLE, names, resolve
from weft.tasks.base import Task
from weft.tokenization.trainable import Tokenizer

ROOTS = {"model": Model, "task": Task, "tokenizer": Tokenizer}
ALL = [(kind, name) for kind, table in TABLE.items() for name in table]


@pytest.mark.parametrize(("kind", "name"), ALL)
def test_every_name_leads_to_a_class_of_its_kind(kind, name):
    found = resolve(kind, name, trust=False)
    assert issubclass(found, ROOTS[kind])
    assert issubclass(found.Config, Named)
    assert name in names(kind)


@pytest.fixture
def own(tmp_path, monkeypatch):
    """Return a package of the user's own, not imported yet."""
    (tmp_path / "own_pack").mkdir()
    (tmp_path / "own_pack" / "__init__.py").write_text("")
    (tmp_path / "own_pack" / "parts.py").write_text(
        "from weft.models.seq2seq.model import Seq2Seq\n\nclass Mine(Seq2Seq):\n    pass\n\ndef make():\n    pass\n"
    )
    (tmp_path / "own_pack" / "broken.py").write_text("import there_is_no_such_module\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield "own_pack.parts:Mine"
    for name in [name for name in sys.modules if name.split(".")[0] == "own_pack"]:
        del sys.modules[name]


def test_a_users_own_class_goes_by_its_place(own):
    assert resolve("model", own).__name__ == "Mine"


def test_without_trust_it_is_refused_and_not_even_imported(own):
    with pytest.raises(ConfigError, match=r"code from outside weft.*load it with trust=True \(command line: --trust\)"):
        resolve("model", own, trust=False)
    assert "own_pack.parts" not in sys.modules
    resolve("model", own, trust=True)
    assert "own_pack.parts" in sys.modules


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("seq2sec", "there is no model 'seq2sec'; did you mean 'seq2seq'?"),
        ("", "there is no model ''; known: bert, cnn, "),
        ("own_pakc.parts:Mine", "there is no module 'own_pakc'; is its folder on PYTHONPATH"),
        ("own_pack.prats:Mine", "there is no module 'own_pack.prats'"),
        ("own_pack.parts:Mime", "module 'own_pack.parts' has no 'Mime'; did you mean 'Mine'"),
        ("own_pack.parts:make", "must be a class with a Config, but is <function make"),
        ("own_pack.parts:", "must be a name, or package.module:Class"),
        (":Mine", "must be a name, or package.module:Class"),
        ("..parts:Mine", "must be a name, or package.module:Class"),
        ("own_pack.parts:Mine:More", "must be a name, or package.module:Class"),
        ("a/b.py:Mine", "must be a name, or package.module:Class"),
    ],
)
def test_mistakes_are_named(own, name, message):
    with pytest.raises(ConfigError) as error:
        resolve("model", name)
    assert str(error.value).startswith("model.name: ")
    assert message in str(error.value)


def test_what_fails_inside_the_users_module_is_shown_as_it_is(own):
    with pytest.raises(ModuleNotFoundError, match="there_is_no_such_module"):
        resolve("model", "own_pack.broken:Mine")
