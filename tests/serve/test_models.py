"""Models under the names by which requests call them."""

import pytest

from weft.errors import ConfigError, DataError, RoleError
from weft.serve.models import load_models, renumbered


def test_names_are_those_of_folders_or_given(trained_run, tmp_path, monkeypatch):
    served = load_models([str(trained_run), f"mine={trained_run / 'best'}"], "cpu", False, "fp32")
    assert list(served) == ["run", "mine"]
    with pytest.raises(ConfigError, match="two models are called 'run'"):
        load_models([str(trained_run), str(trained_run / "last")], "cpu", False, "fp32")
    odd = tmp_path / "a=b c"
    odd.symlink_to(trained_run)
    assert list(load_models([str(odd)], "cpu", False, "fp32")) == ["run"]  # a path that exists is no NAME=PATH


def test_an_error_has_the_number_of_its_own_request():
    assert str(renumbered(DataError("example 7: too long"), 2)) == "example 2: too long"
    assert str(renumbered(DataError("too long"), 2, "text")) == "text 2: too long"
    error = RoleError("model: no")
    assert renumbered(error, 2) is error
