"""Roles: a task's needs are held against what a model, as configured, can do, before any data is read."""

import pytest
import torch
from torch import nn

from weft.config.schema import Named
from weft.errors import RoleError
from weft.models.base import Model, Role, check_roles
from weft.registry import resolve
from weft.tokens import Tokens


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


STATES = {
    "rnn": {"width": 6},
    "rnn backward": {"width": 6, "direction": "backward"},
    "rnn both": {"width": 6, "layers": 2, "direction": "both"},
    "rnn apart": {"width": 6, "layers": 2, "direction": "both", "apart": True},
    "gpt": {"width": 6, "heads": 2, "layers": 2, "max_positions": 16},
    "bert": {"width": 6, "heads": 2, "layers": 2, "max_positions": 16, "pooler": "none"},
}


@pytest.mark.parametrize("name", STATES)
def test_final_states_are_those_that_a_body_pools_by_itself(name):
    cls = resolve("model", name.partition(" ")[0])
    config = cls.Config(name=name.partition(" ")[0], **STATES[name])
    model, tokens = cls(config, 9).double().eval(), Tokens.pack([[1, 2, 3], [4], [5, 6, 7, 8]])
    states = model.encode(tokens)[0]
    torch.testing.assert_close(model.final_states(states, tokens), model.pooled_output(tokens))
    assert not torch.equal(model.final_states(states.roll(1, 0), tokens), model.pooled_output(tokens))
