"""Windows and next-sentence pairs: all tokens come from the corpus, and only the text reveals the label."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.data.batching.mlm_sequences import (
    MIN_CHUNK,
    BoundaryTokens,
    DocumentChunks,
    DocumentStream,
    MLMWindows,
    SentencePairs,
    SequenceStream,
    join_consecutive,
    join_pairs,
)
from weft.errors import DataError

BOS, EOS = 0, 1
VOCAB = 4000
sizes_of_documents = st.lists(st.integers(0, 90), min_size=2, max_size=15)


def corpus(sizes, seed=0):
    """Return documents with unique tokens, so that each token identifies its source."""
    starts = np.concatenate([[0], np.cumsum(np.array(sizes, int) + 1)])
    ids = np.arange(2, 2 + starts[-1]).astype(np.int32)
    ids[starts[:-1]] = BOS
    return ids, starts


def owner_of(starts, id):
    return int(np.searchsorted(starts, id - 2, "right")) - 1


def special_tokens(begins=True, ends=()):
    ending = np.zeros(VOCAB, bool)
    ending[list(ends)] = True
    return BoundaryTokens(BOS, [EOS], EOS, np.full(VOCAB, begins), ending)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=12), st.integers(6, 20), st.integers(1, 90), st.integers(0, 3))
@settings(max_examples=30, deadline=None)
def test_windows_are_of_one_shape_and_read_what_is_there(sizes, longest, tokens, epoch):
    ids, _ = corpus(sizes)
    windows = MLMWindows.of(SequenceStream(ids, BOS, EOS), longest, tokens)
    batches = windows.epoch(1, epoch, 1)
    assert batches
    read = []
    for spans in batches:
        assert spans.shape == (windows.rows, 2)
        for span in spans.tolist():
            (text,) = windows.stream.item(*span)
            assert len(text) == windows.width <= longest
            assert text[0] == BOS
            assert text[-1] == EOS
            assert BOS not in text[1:]
            inside = np.where(ids[slice(*span)] == BOS, EOS, ids[slice(*span)])
            assert (text[1:-1] == inside).all()
            read += [id for id in text.tolist() if id > EOS]
    assert windows.static_shape.sizes == (windows.rows * windows.width,)
    assert len(read) - len(set(read)) <= sum(map(len, batches))  # beside a document's beginning one token is read again


@given(st.lists(st.integers(1, 40), min_size=1, max_size=12), st.integers(6, 20))
@settings(max_examples=20, deadline=None)
def test_to_judge_by_all_is_read(sizes, longest):
    ids, _ = corpus(sizes)
    windows = MLMWindows.of(SequenceStream(ids, BOS, EOS), longest, 64)
    texts = [windows.stream.item(*span)[0] for spans in windows.every() for span in spans.tolist()]
    assert {id for text in texts for id in text.tolist()} - {BOS, EOS} == set(ids.tolist()) - {BOS}
    assert all(len(text) <= longest for text in texts)


def test_a_window_does_not_begin_with_two_signs():
    ids, _ = corpus([7] * 40)
    windows = MLMWindows.of(SequenceStream(ids, BOS, EOS), 10, 100)  # each begins where a document does
    texts = [windows.stream.item(*span)[0] for spans in windows.every() for span in spans.tolist()]
    assert not any(text[1] == EOS for text in texts[:-1])  # after the last there is nothing to read instead
    plain = [windows.stream.item(start, start + 8)[0] for start in range(0, 80, 8)]
    assert all(text[1] == EOS for text in plain)  # the negative control: as they would be cut


@given(sizes_of_documents, st.integers(2, 30), st.sampled_from([0.0, 0.1, 0.9]), st.integers(0, 5))
@settings(max_examples=40, deadline=None)
def test_pieces_are_the_documents_cut_up(sizes, room, shorter, seed):
    ids, starts = corpus(sizes)
    rng = np.random.default_rng(seed)
    pieces = DocumentChunks.of(starts, room, rng).split_some(shorter, rng)
    read = [id for start, size in zip(pieces.starts, pieces.sizes, strict=True) for id in ids[start : start + size]]
    assert len(read) == len(set(read))
    assert BOS not in read
    left = (np.diff(starts) - 1) % room == 1  # a rest of one token is too short for two segments
    assert len(read) == sum(sizes) - left.sum()
    assert ((pieces.sizes >= MIN_CHUNK) & (pieces.sizes <= room)).all()
    assert [owner_of(starts, ids[start]) for start in pieces.starts] == pieces.owners.tolist()
    assert [owner_of(starts, ids[start + size - 1]) for start, size in zip(pieces.starts, pieces.sizes, strict=True)] \
        == pieces.owners.tolist()  # fmt: skip


def test_as_many_pieces_are_full_as_can_be_and_some_are_cut_again():
    _, starts = corpus([95] * 300)
    rng = np.random.default_rng(0)
    whole = DocumentChunks.of(starts, 20, rng)
    assert (whole.sizes == 20).sum() == 4 * 300
    assert (whole.sizes == 15).sum() == 300
    firsts = whole.sizes[np.searchsorted(whole.owners, np.arange(300))]
    assert 30 < (firsts == 15).sum() < 90  # the short one is anywhere
    cut = whole.split_some(0.1, rng)
    assert abs(len(cut.sizes) - len(whole.sizes) - 150) < 50
    assert cut.sizes.sum() == whole.sizes.sum()


@given(sizes_of_documents, st.integers(2, 30), st.integers(0, 5))
@settings(max_examples=40, deadline=None)
def test_a_partner_is_of_another_document(sizes, room, seed):
    _, starts = corpus([*sizes, 5, 9])
    rng = np.random.default_rng(seed)
    pieces = DocumentChunks.of(starts, room, rng).split_some(0.1, rng)
    others = pieces.partners(rng)
    assert (pieces.owners[others] != pieces.owners).all()


def test_a_partner_is_about_as_long_and_ends_a_document_as_its_piece_does():
    rng = np.random.default_rng(0)
    _, starts = corpus(rng.integers(2, 60, 400))
    pieces = DocumentChunks.of(starts, 30, rng)
    others = pieces.partners(rng)
    last = np.diff(pieces.owners, append=-1) != 0
    assert (last == last[others]).mean() > 0.99
    assert np.abs(pieces.sizes[others] - pieces.sizes).max() <= 12
    assert len(np.unique(others)) > 0.4 * len(others)


def test_one_document_has_no_pairs():
    for sizes in ([500], [500, 1, 0], [1, 1, 0]):
        ids, starts = corpus(sizes)
        with pytest.raises(DataError, match=r"two documents .* task\.next_sentence: false"):
            SentencePairs.of(DocumentStream(ids, starts), 20, 3, 100, 0.1)
    with pytest.raises(DataError, match="a document of two tokens at least"):
        SentencePairs.of(DocumentStream(ids, starts), 20, 3, 100, 0.1, partners=False)


@given(st.lists(st.integers(3, 90), min_size=1, max_size=12), st.integers(6, 40), st.booleans())
@settings(max_examples=20, deadline=None)
def test_consecutive_segments_are_what_the_document_has_in_order_or_swapped(sizes, longest, swap):
    ids, starts = corpus(sizes)
    sampler = SentencePairs.of(DocumentStream(ids, starts), longest, 3, 200, 0.1, partners=False)
    for number, spans in enumerate(sampler.epoch(1, 0, 1)):
        chunks = [sampler.stream.item(*span)[1] for span in spans.tolist()]
        tokens, labels = join_consecutive(chunks, special_tokens(), np.random.default_rng(number), swap)
        assert int(tokens.lengths.max()) <= longest
        assert len(tokens.ids) <= sampler.static_shape.room[0]
        assert swap or not labels.any()
        rows = zip(chunks, tokens.split(), tokens.split(tokens.segments), labels.tolist(), strict=True)
        for chunk, text, kinds, label in rows:
            first, second = text[kinds == 0], text[kinds == 1]
            assert (first[0], first[-1], second[-1]) == (BOS, EOS, EOS)
            a, b = first[1:-1].tolist(), second[:-1].tolist()
            assert a
            assert b
            assert (b + a if label else a + b) == chunk.tolist()


def test_half_of_the_pairs_are_swapped():
    chunks = [np.arange(10, 20)] * 400
    _, labels = join_consecutive(chunks, special_tokens(), np.random.default_rng(0), swap=True)
    assert 0.4 < labels.mean() < 0.6


@given(st.lists(st.integers(3, 90), min_size=2, max_size=12), st.integers(6, 40), st.integers(0, 3))
@settings(max_examples=30, deadline=None)
def test_what_follows_follows_and_what_does_not_is_of_another_document(sizes, longest, epoch):
    ids, starts = corpus(sizes)
    sampler = SentencePairs.of(DocumentStream(ids, starts), longest, 3, 200, 0.1)
    for number, spans in enumerate(sampler.epoch(1, epoch, 1)):
        items = [sampler.stream.item(*span) for span in spans.tolist()]
        tokens, labels = join_pairs(items, special_tokens(), np.random.default_rng(number))
        assert int(tokens.lengths.max()) <= longest
        assert len(tokens) <= sampler.static_shape.rows
        assert len(tokens.ids) <= sampler.static_shape.room[0]
        assert set(labels.tolist()) <= {0, 1}
        for text, kinds, label in zip(tokens.split(), tokens.split(tokens.segments), labels, strict=True):
            first, second = text[kinds == 0], text[kinds == 1]
            assert (first[0], first[-1], second[-1]) == (BOS, EOS, EOS)
            a, b = first[1:-1].numpy(), second[:-1].numpy()
            assert len(a) >= 1
            assert len(b) >= 1
            assert (np.diff(a) == 1).all()
            assert (np.diff(b) == 1).all()
            assert kinds.tolist() == sorted(kinds.tolist())
            owners = owner_of(starts, a[0]), owner_of(starts, b[0])
            assert owners[0] == owner_of(starts, a[-1])
            assert owners[1] == owner_of(starts, b[-1])
            assert (owners[0] == owners[1]) == (label == 0)
            assert label or b[0] == a[-1] + 1


def joined(sizes, longest, seed=0, ends=(), begins=True):
    ids, starts = corpus(sizes)
    sampler = SentencePairs.of(DocumentStream(ids, starts), longest, 3, 4000, 0.1)
    items = [sampler.stream.item(*span) for spans in sampler.epoch(1, seed, 1) for span in spans.tolist()]
    return items, *join_pairs(items, special_tokens(begins, ends), np.random.default_rng(seed))


def pair_features(sizes, longest):
    """Return for each pair its label, its length and its segments' lengths, and whether it ends with a sentence."""
    _, starts = corpus(sizes)
    whole = [first + 2 + np.arange(7, size + 1, 7) for first, size in zip(starts, sizes, strict=False)]
    ends, rows = set(np.concatenate(whole).tolist()), []
    for seed in range(40):
        _, tokens, labels = joined(sizes, longest, seed, ends)
        for text, kinds, label in zip(tokens.split(), tokens.split(tokens.segments), labels.tolist(), strict=True):
            second = text[kinds == 1]
            rows.append((label, len(text), len(second), int(second[-2]) in ends, int(second[0]) - 1 in ends))
    return np.array(rows, float)


def means_differ(labels, features):
    """Return whether the mean of a feature differs significantly between the labels."""
    differences = np.abs(features[labels == 0].mean(0) - features[labels == 1].mean(0))
    return bool((differences > 4 * features.std(0) * 2 / np.sqrt(len(labels))).any())


def test_half_of_the_pairs_follow_and_neither_lengths_nor_ends_tell_which():
    rows = pair_features(7 * np.random.default_rng(3).integers(1, 18, 60), 40)  # each document is of whole sentences
    labels, features = rows[:, 0], rows[:, 1:]
    assert abs(labels.mean() - 0.5) < 4 * 0.5 / np.sqrt(len(labels))
    assert features[:, 2].mean() > 0.2  # many end where a document does
    assert not means_differ(labels, features)
    # the negative control: were a tenth of what follows read to its document's end, it would show
    shown = features.copy()
    shown[(labels == 0) & (np.arange(len(labels)) % 10 == 0), 2] = 1
    assert means_differ(labels, shown)


def firsts_of(tokens):
    pairs = zip(tokens.split(), tokens.split(tokens.segments), strict=True)
    return [int(text[kinds == 1][0]) for text, kinds in pairs]


def beginnings(items, labels, good):
    """Of each pair whose second segment could begin so, say what it could be cut from."""
    cut = [item[1 + int(label)][1:] for item, label in zip(items, labels, strict=True)]
    return [any(good(id) for id in text.tolist()) for text in cut]


def test_segments_begin_with_sentences_where_there_are_some():
    ends = set(range(2, VOCAB, 7))  # a sentence ends every seven tokens
    items, tokens, labels = joined([150] * 20, 40, 0, ends)
    could = beginnings(items, labels, lambda id: id - 1 in ends)
    does = [first - 1 in ends for first in firsts_of(tokens)]
    assert np.mean(could) > 0.8
    assert all(did for did, can in zip(does, could, strict=True) if can)
    for label in (0, 1):
        assert any(did for did, own in zip(does, labels, strict=True) if own == label)
    _, tokens, _ = joined([150] * 20, 40)
    assert np.mean([first - 1 in ends for first in firsts_of(tokens)]) < 0.4  # the negative control: no end is known


def test_no_word_is_cut_in_two_if_it_can_be_helped():
    items, tokens, labels = joined([150] * 20, 40, begins=np.arange(VOCAB) % 3 == 0)
    could = beginnings(items, labels, lambda id: id % 3 == 0)
    does = [first % 3 == 0 for first in firsts_of(tokens)]
    assert all(did for did, can in zip(does, could, strict=True) if can)
    _, tokens, _ = joined([150] * 20, 40)
    assert np.mean([first % 3 == 0 for first in firsts_of(tokens)]) < 0.6


def test_an_epoch_follows_from_seed_and_number():
    ids, starts = corpus([60, 70, 10, 80, 33])
    sampler = SentencePairs.of(DocumentStream(ids, starts), 20, 3, 100, 0.1)

    def drawn(seed, number):
        return [spans.tolist() for spans in sampler.epoch(seed, number, 1)]

    assert drawn(1, 0) == drawn(1, 0)
    assert drawn(1, 0) != drawn(1, 1)
    assert drawn(1, 0) != drawn(2, 0)


def test_little_of_a_frame_is_left_over():
    rng = np.random.default_rng(0)
    ids, starts = corpus(rng.integers(20, 200, 600))
    sampler = SentencePairs.of(DocumentStream(ids, starts), 64, 3, 4096, 0.1)
    wide = BoundaryTokens(BOS, [EOS], EOS, np.ones(len(ids) + 2, bool), np.arange(len(ids) + 2) % 9 == 0)
    shares = []
    for number, spans in enumerate(sampler.epoch(1, 0, 1)[:-1]):
        items = [sampler.stream.item(*span) for span in spans.tolist()]
        shares.append(
            len(join_pairs(items, wide, np.random.default_rng(number))[0].ids) / sampler.static_shape.sizes[0]
        )
    assert np.mean(shares) > 0.94
