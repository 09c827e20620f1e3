"""Prepared corpora: merged parts equal `pack` of all items, memory-mapped without a copy; damage is detected."""

import json
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.data.batching.packed_items import pack
from weft.data.corpus import format
from weft.data.corpus.format import (
    FORMAT,
    CorpusManifest,
    SplitManifest,
    find_corpus,
    open_split,
    read_manifest,
    verify_split,
    write_json_atomically,
)
from weft.data.corpus.merge import NARROW, WIDE, PartCounts, TooWide, merge_parts, read_part_counts, write_tokens
from weft.errors import DataError

number = st.integers(0, 2**16 - 1)
item = st.lists(st.lists(number, max_size=5), min_size=1, max_size=3)
documents = st.lists(st.tuples(st.integers(0, 99), st.lists(item, max_size=3)), max_size=6)


def arrays(raw):
    return [(size, [tuple(np.array(part, np.int32) for part in item) for item in items]) for size, items in raw]


def write_part(stem, raw, dtype=NARROW):
    lengths = write_tokens(stem, arrays(raw), dtype)
    lengths.save(stem)
    counts = {"skipped": 0, "reasons": (), "cut": 0, "dropped": 0, "windowed": 0, "longest_seen": 0}
    counts = PartCounts(
        rows=(len(raw),),
        documents=len(lengths.documents),
        items=len(lengths.items),
        sequences=len(lengths.sequences),
        tokens=sum(lengths.sequences),
        bytes=sum(lengths.bytes),
        dtype=dtype.str,
        **counts,
    )
    write_json_atomically(stem.with_suffix(".json"), counts)
    return counts


def make_corpus(folder, *parts, dtypes=None):
    """Write a corpus with the split `train` of these parts, each a list of documents."""
    stems = [folder / f"{index:05d}" for index in range(len(parts))]
    dtypes = dtypes or [NARROW] * len(parts)
    counts = [write_part(*part) for part in zip(stems, parts, dtypes, strict=True)]
    digest, files = merge_parts(stems, counts, folder / "train")
    total = {name: sum(getattr(part, name) for part in counts) for name in ("documents", "items", "tokens", "bytes")}
    split = SplitManifest(**total, digest=digest, files=files, origins=(), notice="", longest=0)
    raw = {key: {} for key in ("task", "data", "tokenizer", "resolved_task")}
    write_json_atomically(
        folder / format.CORPUS_MANIFEST,
        CorpusManifest(format=FORMAT, **raw, vocabulary="", probes=(), splits={"train": split}),
    )
    return folder


@settings(max_examples=12, deadline=None)
@given(st.lists(documents, min_size=1, max_size=4), st.sampled_from([None, 1, 2]))
def test_parts_joined_are_what_pack_makes_of_all(tmp_path_factory, parts, counted):
    shards = open_split(make_corpus(tmp_path_factory.mktemp("c"), *parts), "train", counted)
    non_empty = [(size, items) for part in parts for size, items in arrays(part) if items]
    expected = pack((item for _, items in non_empty for item in items), num_token_arrays=counted)
    assert shards.digest == expected.digest
    assert shards.ids.tolist() == expected.ids.tolist()
    for name in ("starts", "items", "sizes", "shapes"):
        assert np.array_equal(getattr(shards, name), getattr(expected, name))
    assert [[part.tolist() for part in shards[n]] for n in range(len(shards))] == [
        [part.tolist() for part in expected[n]] for n in range(len(expected))
    ]
    assert shards.bytes.tolist() == [size for size, _ in non_empty]
    assert np.diff(shards.documents).tolist() == [len(items) for _, items in non_empty]


@given(documents, documents)
@settings(max_examples=12, deadline=None)
def test_how_documents_are_shared_out_does_not_matter(tmp_path_factory, first_parts, second_parts):
    both = make_corpus(tmp_path_factory.mktemp("c"), first_parts, second_parts)
    whole = make_corpus(tmp_path_factory.mktemp("c"), first_parts + second_parts)
    assert read_manifest(both) == read_manifest(whole)


def test_parts_in_another_order_are_another_corpus(tmp_path):
    for name, parts in (("one", (SOME, SOME[:1])), ("two", (SOME[:1], SOME))):
        (tmp_path / name).mkdir()
        make_corpus(tmp_path / name, *parts)
    assert open_split(tmp_path / "one", "train").digest != open_split(tmp_path / "two", "train").digest


SOME = [(5, [[[1, 2, 3]], [[4]]]), (3, [[[2**16 - 1]]])]


def test_ids_are_of_sixteen_bits_as_long_as_all_fit(tmp_path):
    (tmp_path / "narrow").mkdir()
    assert open_split(make_corpus(tmp_path / "narrow", SOME), "train").ids.dtype == np.uint16
    for wrong in (2**16, -1):
        with pytest.raises(TooWide):
            write_tokens(tmp_path / "x", arrays([(1, [[[wrong]]])]), NARROW)
    (tmp_path / "mixed").mkdir()
    wide = [(1, [[[2**16, -1]]])]
    shards = open_split(make_corpus(tmp_path / "mixed", SOME, wide, dtypes=[NARROW, WIDE]), "train")
    assert shards.ids.dtype == np.int32
    assert shards.ids.tolist() == [1, 2, 3, 4, 2**16 - 1, 2**16, -1]


def test_nothing_is_copied_and_nothing_can_be_written(tmp_path):
    shards = open_split(make_corpus(tmp_path, SOME), "train")
    assert isinstance(shards.ids.base, np.memmap)
    assert np.shares_memory(shards[0][0], shards.ids)
    assert not shards[0][0].flags.writeable
    assert not isinstance(shards.ids, np.memmap)  # which is slow to slice


def test_memory_holds_a_chunk_of_tokens_not_all(tmp_path):
    part = np.arange(1000, dtype=np.int32)
    tracemalloc.start()
    lengths = write_tokens(tmp_path / "00000", ((9, [(part,)]) for _ in range(6000)), NARROW)  # 12 MB
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert sum(lengths.sequences) == 6_000_000
    assert peak < 5_000_000


def flip(path):
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)


@pytest.mark.parametrize("name", ["ids", "starts", "items", "documents", "bytes"])
def test_what_is_damaged_is_refused(tmp_path, name):
    folder = make_corpus(tmp_path, SOME)
    path, whole = folder / "train" / f"{name}.npy", (folder / "train" / f"{name}.npy").read_bytes()
    flip(path)
    with pytest.raises(DataError, match=f"{name}.npy: is damaged: its SHA-256 is not that of what was written"):
        open_split(folder, "train")
    path.write_bytes(whole[:-1])
    with pytest.raises(DataError, match=f"{name}.npy: is damaged: must have {len(whole):,} bytes, but has"):
        open_split(folder, "train")
    path.unlink()
    with pytest.raises(DataError, match=f"{name}.npy: cannot be read: No such file"):
        open_split(folder, "train")
    path.write_bytes(whole)
    assert len(open_split(folder, "train")) == 3


def test_a_large_corpus_is_opened_by_its_sizes_alone(tmp_path, monkeypatch):
    folder = make_corpus(tmp_path, SOME)
    monkeypatch.setattr(format, "VERIFY_LIMIT", 0)
    flip(folder / "train" / "ids.npy")
    assert len(open_split(folder, "train")) == 3
    with pytest.raises(DataError, match="SHA-256"):
        verify_split(folder, "train", read_manifest(folder).splits["train"], content=True)


def test_a_manifest_that_is_damaged_or_of_another_format_is_refused(tmp_path):
    folder = make_corpus(tmp_path, SOME)
    path = folder / format.CORPUS_MANIFEST
    raw = json.loads(path.read_text())
    for broken, message in (
        ("{", "cannot be read"),
        (json.dumps({**raw, "format": FORMAT + 1}), f"its format is {FORMAT + 1}, and this weft reads {FORMAT}"),
        (json.dumps({**raw, "splits": {"train": {}}}), "splits.train.documents: Field required"),
    ):
        path.write_text(broken)
        with pytest.raises(DataError, match=message):
            open_split(folder, "train")


def test_a_split_that_is_not_there_or_not_finished_is_told(tmp_path):
    folder = make_corpus(tmp_path, SOME)
    with pytest.raises(DataError, match="has no split 'valid', but: train; run weft data prepare with --split valid"):
        open_split(folder, "valid")
    (folder / "parts" / "valid").mkdir(parents=True)
    with pytest.raises(DataError, match="its split 'valid' is not finished"):
        open_split(folder, "valid")


def test_only_a_folder_with_a_manifest_is_a_corpus(tmp_path):
    assert find_corpus(str(tmp_path)) is None
    assert find_corpus(None) is None
    assert find_corpus([str(tmp_path)]) is None
    assert find_corpus(str(make_corpus(tmp_path, SOME))) == tmp_path


def test_a_part_that_is_not_whole_is_made_again(tmp_path):
    stem = tmp_path / "00000"
    assert read_part_counts(stem) is None
    counts = write_part(stem, SOME)
    assert read_part_counts(stem) == counts
    whole = stem.with_suffix(".ids").read_bytes()
    stem.with_suffix(".ids").write_bytes(whole[:-1])
    assert read_part_counts(stem) is None
    stem.with_suffix(".ids").write_bytes(whole)
    stem.with_suffix(".npz").unlink()
    assert read_part_counts(stem) is None
    write_part(stem, SOME)
    stem.with_suffix(".json").write_text("{}")
    assert read_part_counts(stem) is None


def test_a_file_that_could_not_be_written_whole_leaves_the_old_one(tmp_path):
    def failing():
        yield from arrays(SOME)
        raise OSError("no space")

    write_part(tmp_path / "00000", SOME)
    before = (tmp_path / "00000.ids").read_bytes()
    with pytest.raises(OSError, match="no space"):
        write_tokens(tmp_path / "00000", failing(), NARROW)
    assert (tmp_path / "00000.ids").read_bytes() == before
