"""Roles: a task's needs are held against what a model, as configured, can do, before any data is read."""

import pytest
from torch import nn

from weft.config.schema import Named
from weft.errors import RoleError
from weft.models.base import Model, Role, check_roles


class Reader(Model):
    Config = Named

    @classmethod
    def roles(cls, config):
        return frozenset({Role.ENCODER, Role.MASKED_LM})


CONFIG = Named(name="reader")


def test_a_model_that_can_do_all_that_is_needed_is_taken():
    check_roles("tag", {Role.ENCODER}, "reader", Reader.roles(CONFIG))
    check_roles("nothing", (), "reader", ())


def test_a_model_that_lacks_a_role_is_refused_with_what_it_does_and_lacks():
    with pytest.raises(RoleError) as caught:
        check_roles("translate", {Role.GENERATOR, Role.SEQ2SEQ}, "reader", Reader.roles(CONFIG))
    assert str(caught.value) == (
        "model.name: task 'translate' needs a model that takes a source and generates; 'reader', as configured, "
        "encodes and fills: it lacks 'takes a source and generates'"
    )


def test_only_what_is_missing_is_named_as_missing():
    with pytest.raises(RoleError, match=r"needs a model that encodes and scores.*it lacks 'scores'$"):
        check_roles("lm", [Role.LANGUAGE_MODEL, Role.ENCODER], "reader", Reader.roles(CONFIG))


def test_a_model_with_no_roles_does_nothing():
    with pytest.raises(RoleError, match="'idle', as configured, does nothing: it lacks 'scores'"):
        check_roles("lm", {Role.LANGUAGE_MODEL}, "idle", ())


def test_a_class_that_names_no_roles_is_told_to():
    class Nameless(Model):
        Config = Named

    with pytest.raises(RoleError, match=r"Nameless names no roles; define roles\(config\)"):
        Nameless.roles(CONFIG)


def test_a_model_knows_its_vocabularies():
    shared, separate = Reader(CONFIG, 7), Reader(CONFIG, 7, 9)
    assert (shared.config, shared.vocab, shared.target_vocab) == (CONFIG, 7, 7)
    assert (separate.vocab, separate.target_vocab) == (7, 9)


def test_a_model_keeps_all_of_itself_unless_it_says_what_it_can_drop():
    class Whole(Reader):
        def __init__(self, config, vocab):
            super().__init__(config, vocab)
            self.embed, self.output = nn.Embedding(vocab, 2), nn.Linear(2, vocab)

    class Dropping(Whole):
        def prune_unused(self, needs):
            if Role.MASKED_LM not in needs:
                del self.output

    for needs in (set(), {Role.ENCODER}, [Role.MASKED_LM], frozenset(Role)):
        model = Whole(CONFIG, 3)
        before = set(model.state_dict())
        model.prune_unused(needs)
        assert set(model.state_dict()) == before
    dropped, held = Dropping(CONFIG, 3), Dropping(CONFIG, 3)
    dropped.prune_unused({Role.ENCODER})
    held.prune_unused({Role.ENCODER, Role.MASKED_LM})
    assert set(dropped.state_dict()) == {"embed.weight"}
    assert set(held.state_dict()) == before
