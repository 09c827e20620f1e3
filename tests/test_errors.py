"""The tree of errors, and the remedy for an unknown name."""

import errno

import pytest
from hypothesis import given
from hypothesis import strategies as st

import weft
from weft import errors
from weft.errors import WeftError, did_you_mean


def test_all_errors_are_one_familys_and_public():
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception)]
    assert len(kinds) == 6
    for kind in kinds:
        assert issubclass(kind, WeftError)
        assert getattr(weft, kind.__name__) is kind
        assert kind.__name__ in weft.__all__
        assert kind.__name__ in errors.__doc__


def test_a_very_long_message_keeps_its_place_and_its_remedy():
    message = f"recipe.yaml: must be a number, but is {'x' * 70_000!r} instead; give one"
    shown = str(weft.ConfigError(message))
    assert len(shown) < 5_000
    assert shown.startswith("recipe.yaml: must be a number, but is 'xxx")
    assert shown.endswith("xxx' instead; give one")
    assert str(weft.ConfigError(message[:4_000])) == message[:4_000]


def test_they_are_not_confused_with_pythons_own():
    assert not issubclass(WeftError, ValueError | OSError | LookupError)


@pytest.mark.parametrize(
    ("name", "known", "hint"),
    [
        ("beem", ["beam", "seed"], "did you mean 'beam'?"),
        ("translat", ["classify", "translate"], "did you mean 'translate'?"),
        ("zebra", ["beam", "seed"], "known: beam, seed"),
        ("zebra", ["seed", "beam"], "known: beam, seed"),
        ("", ["beam"], "known: beam"),
    ],
)
def test_the_nearest_name_or_all_of_them(name, known, hint):
    assert did_you_mean(name, known) == hint
    assert did_you_mean(name, iter(known)) == hint


@given(st.lists(st.text(min_size=4, max_size=8), min_size=1, unique=True), st.data())
def test_a_known_name_is_its_own_nearest(known, data):
    name = data.draw(st.sampled_from(known))
    assert did_you_mean(name, known) == f"did you mean {name!r}?"


def test_the_package_offers_its_names_and_no_others():
    import weft.models.base  # an import of its parts adds nothing

    assert set(dir(weft)) == {*weft.__all__, "__version__"}
    assert {"estimators", "testing", "load", "train", "compare", "Pipeline"} <= set(dir(weft))
    for name in weft.__all__:
        assert getattr(weft, name)
    with pytest.raises(AttributeError, match="'weft' has no attribute 'tran'"):
        weft.tran  # noqa: B018


def test_a_long_list_of_names_is_not_shown_whole():
    names = [f"name {number}" for number in range(1000)]
    assert did_you_mean("zzz", names).endswith(" and 940 more")
    assert did_you_mean("nme 7", names) == "did you mean 'name 7'?"
    assert errors.nearest("nme 7", (f"name {number}" for number in range(10_000))) is None  # it would take seconds


def test_a_long_value_is_abbreviated():
    assert errors.abbreviate("short") == "'short'"
    assert len(errors.abbreviate(["label"] * 1000)) == errors.MAX_SHOWN
    assert errors.abbreviate("x" * 100, 10) == "'xxxxxx..."


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.ENOSPC, "free some room"),
        (errno.EACCES, "make it writable, or choose another place"),
        (errno.EISDIR, "move what is there, or choose another place"),
        (errno.ENAMETOOLONG, "choose a shorter name"),
        (errno.EIO, "check the path and its disk"),
    ],
)
def test_what_cannot_be_written_has_the_remedy_of_its_reason(number, remedy):
    assert errors.disk_remedy(OSError(number, "reason")) == remedy
