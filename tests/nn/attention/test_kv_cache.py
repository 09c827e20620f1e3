"""The cache against lists of Python: what each hypothesis has read, whatever was stepped and selected before."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests import transformer_equations as paper

from weft.nn.attention import kv_cache
from weft.nn.attention.kv_cache import KVCache, KVIndex, attend_cached
from weft.tokens import Tokens

LAYERS, SHAPE = 2, (2, 3, 4)  # keys and values of 3 heads, 4 wide


def tokens_of(lengths):
    return Tokens.flat(torch.zeros(sum(lengths), dtype=torch.long), torch.tensor(lengths, dtype=torch.long))


def drawn(count):
    return [torch.randn(count, *SHAPE) for _ in range(LAYERS)]


class Told:
    """A cache, and beside it what it must hold: for each layer and hypothesis a list of keys and values."""

    def __init__(self, held, lists):
        self.held, self.lists = held, lists

    @classmethod
    def started(cls, lengths):
        prompt, layers = tokens_of(lengths), drawn(sum(lengths))
        return cls(KVCache.of(prompt, layers), [[list(row) for row in prompt.split(kv)] for kv in layers])

    def select(self, rows):
        held = self.held.select(torch.tensor(rows, dtype=torch.long))
        return Told(held, [[lists[row] for row in rows] for lists in self.lists])

    def stepped(self):
        held, made, lists = self.held.opened(), drawn(len(self.lists[0])), []
        for layer, kv in enumerate(made):
            held.write(layer, kv)
            lists.append([[*row, new] for row, new in zip(self.lists[layer], kv, strict=True)])
        return Told(held, lists)

    def check(self):
        assert self.held.position.tolist() == [len(row) - 1 for row in self.lists[0]]
        places, first, last = self.held.kv_index
        for kv, rows in zip(self.held.storage.layers, self.lists, strict=True):
            for row, expected in enumerate(rows):
                own = places[row, int(first[row]) : int(last[row])].long()
                assert torch.equal(kv.flatten(0, 1)[own], torch.stack(expected)), "another's keys and values"


def live(choose, steps=8):
    """Step and select from any state that there ever was; in the end all of them must hold what they held."""
    torch.manual_seed(0)
    states = [Told.started(choose(st.lists(st.integers(1, 4), min_size=1, max_size=3)))]
    for _ in range(steps):
        state = states[choose(st.integers(0, len(states) - 1))]
        if choose(st.booleans()):
            row = st.integers(0, len(state.lists[0]) - 1)
            states.append(state.select(choose(st.lists(row, min_size=1, max_size=4))))
        else:
            states.append(state.stepped())
    for state in states:
        state.check()


@settings(deadline=None, derandomize=True, max_examples=40)
@given(st.data(), st.sampled_from([1, 2, 64]))
def test_every_state_keeps_what_it_has_read(data, room):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kv_cache, "INITIAL_COLUMNS", room)
        live(data.draw)


def path(patch):
    """Go through what a beam search does, and two steps from one state."""
    patch.setattr(kv_cache, "INITIAL_COLUMNS", 2)
    torch.manual_seed(0)
    states = [Told.started([3, 1, 2])]
    for rows in ([0, 0, 1, 2, 2], [4, 1, 0, 0], [1, 3, 2], [2]):
        states += [states[-1].select(rows), states[-1].stepped()]
        states.append(states[-2].stepped())
    for state in states:
        state.check()


def test_a_search_that_branches_keeps_what_it_has_read(monkeypatch):
    path(monkeypatch)


def never_full(self):
    """Open a column that another step has already taken."""
    self.storage.filled = self.end
    return _opened(self)


def lost_first(self, rows):
    """Leave where a hypothesis begins to the one that had its row."""
    kept = torch.arange(len(rows)) % len(self.first)
    return kv_cache.replace(self, index=self.index[rows], first=self.first[kept])


def lost_index(self, rows):
    kept = torch.arange(len(rows)) % len(self.first)
    return kv_cache.replace(self, index=self.index[kept], first=self.first[rows])


_opened = KVCache.opened


@pytest.mark.parametrize(
    ("owner", "name", "wrong"),
    [
        (KVCache, "opened", never_full),
        (KVCache, "select", lost_index),
        (KVCache, "select", lost_first),
        (kv_cache, "moved_index", lambda index, before, after: torch.nn.functional.pad(index, (0, after - before))),
    ],
)
def test_what_is_written_over_lost_or_numbered_wrongly_is_caught(owner, name, wrong, monkeypatch):
    """The negative control."""
    monkeypatch.setattr(owner, name, wrong)
    with pytest.raises(AssertionError):
        path(monkeypatch)


def addresses(told):
    return [kv.data_ptr() for kv in told.held.storage.layers]


def test_select_copies_no_key_or_value():
    state = Told.started([3, 1, 2])
    selected = state.select([2, 0, 0])
    assert selected.held.storage is state.held.storage
    assert addresses(selected) == addresses(state)


def test_a_beam_search_within_the_room_copies_no_key_or_value():
    state = Told.started([1] * 4)
    at, rows = addresses(state), 4
    for number in range(kv_cache.INITIAL_COLUMNS - 1):
        chosen = [row * (number % 3) % rows for row in range(rows)][: rows - (number == 30)]  # one is done before
        state, rows = state.select(chosen).stepped(), len(chosen)
        assert addresses(state) == at
    state.check()


def test_what_copies_is_a_second_step_from_one_state_more_hypotheses_or_a_longer_text(monkeypatch):
    monkeypatch.setattr(kv_cache, "INITIAL_COLUMNS", 4)
    state = Told.started([1, 1])
    first, second = state.stepped(), state.stepped()
    assert addresses(first) == addresses(state) != addresses(second)
    assert addresses(first.select([0, 1, 1]).stepped()) != addresses(state)
    longer = first.stepped().stepped()
    assert addresses(longer) == addresses(state)
    assert addresses(longer.stepped()) != addresses(state)
    assert longer.stepped().held.storage.capacity == 8


@pytest.mark.parametrize("length", [1, 3, 4, 5, 9])
def test_there_is_room_after_a_prompt_of_any_length(length, monkeypatch):
    monkeypatch.setattr(kv_cache, "INITIAL_COLUMNS", 4)
    state = Told.started([length, 1])
    assert state.held.storage.capacity % 4 == 0
    assert addresses(state.stepped()) == addresses(state)
    for _ in range(10):
        state = state.stepped()
    state.check()


def test_a_prompt_may_be_shorter_than_is_said():
    prompt, layers = tokens_of([2, 1]), drawn(3)
    prompt = Tokens(prompt.ids, prompt.starts, prompt.lengths, longest=7)  # an upper bound
    Told(KVCache.of(prompt, layers), [[list(row) for row in prompt.split(kv)] for kv in layers]).stepped().check()


# Attention to what is held.


@pytest.fixture(params=[False, True], ids=["quick", "plain"])
def graded(request):
    """Without gradients, float32 goes through the numba kernel."""
    with torch.set_grad_enabled(request.param):
        yield


def explicit(q, kv, kv_index):
    found = []
    for row, places in enumerate(kv_index.slots):
        own = kv[places[int(kv_index.first[row]) : int(kv_index.last[row])].long()]
        heads = zip(q[row], own[:, 0].unbind(1), own[:, 1].unbind(1), strict=True)
        found.append(torch.stack([paper.attention(Q[None], K, V, False)[0][0] for Q, K, V in heads]))
    return torch.stack(found)


def reached(rows=5, columns=9, held=40, dtype=torch.float64, seed=0):
    torch.manual_seed(seed)
    places = torch.randint(held, (rows, columns), dtype=torch.int32)
    first = torch.randint(columns, (rows,), dtype=torch.int32)
    last = first + 1 + (torch.rand(rows) * (columns - first)).int()
    return torch.randn(rows, 3, 4, dtype=dtype), torch.randn(held, 2, 3, 4, dtype=dtype), KVIndex(places, first, last)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.usefixtures("graded")
def test_a_query_sees_what_it_reaches(seed, dtype, tolerance):
    q, kv, kv_index = reached(seed=seed, dtype=dtype)
    torch.testing.assert_close(attend_cached(q, kv, kv_index), explicit(q, kv, kv_index), rtol=0, atol=tolerance)


def test_a_reach_that_is_one_too_wide_is_caught():
    """The negative control."""
    q, kv, kv_index = reached()
    wide = KVIndex(kv_index.slots, (kv_index.first - 1).clamp(min=0), kv_index.last)
    assert not torch.allclose(attend_cached(q, kv, wide), explicit(q, kv, kv_index), rtol=0, atol=1e-3)


@pytest.mark.usefixtures("graded")
def test_what_is_out_of_reach_changes_nothing_exactly():
    q, kv, kv_index = reached(dtype=torch.float32)
    seen = {int(place) for row in zip(*kv_index, strict=True) for place in row[0][int(row[1]) : int(row[2])]}
    hidden = torch.tensor([place not in seen for place in range(len(kv))])
    assert hidden.any()
    other = torch.where(hidden[:, None, None, None], 1e3, kv)
    assert torch.equal(attend_cached(q, other, kv_index), attend_cached(q, kv, kv_index))


@pytest.mark.usefixtures("graded")
def test_who_reaches_nothing_finds_nothing():
    q, kv, kv_index = reached(dtype=torch.float32)
    nothing = KVIndex(kv_index.slots, kv_index.first, torch.where(torch.arange(5) == 2, kv_index.first, kv_index.last))
    found = attend_cached(q, kv, nothing)
    assert not found[2].any()
    others = [0, 1, 3, 4]
    torch.testing.assert_close(found[others], attend_cached(q, kv, kv_index)[others], rtol=0, atol=1e-6)


@pytest.mark.parametrize("lengths", [[3, 1, 4], [2, 0, 3], [0, 2], [2, 0], [0, 0]])
@pytest.mark.usefixtures("graded")
def test_each_hypothesis_reaches_its_own_source(lengths):
    tokens = tokens_of(lengths)
    kv, q = torch.randn(sum(lengths), 2, 3, 4), torch.randn(len(lengths), 3, 4)
    kv_index = KVIndex.of(tokens)
    found = attend_cached(q, kv, kv_index)
    for row, own in enumerate(tokens.split(kv)):
        heads = zip(q[row], own[:, 0].unbind(1), own[:, 1].unbind(1), strict=True)
        expected = torch.stack([paper.attention(Q[None], K, V, False)[0][0] for Q, K, V in heads])
        torch.testing.assert_close(found[row], expected, rtol=0, atol=1e-6)
    rows = torch.tensor([len(lengths) - 1, 0, 0])
    torch.testing.assert_close(attend_cached(q[rows], kv, kv_index.select(rows)), found[rows], rtol=0, atol=1e-6)
