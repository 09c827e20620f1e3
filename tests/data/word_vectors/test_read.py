import gzip
import tracemalloc

import numpy as np
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from weft.data.word_vectors.read import VectorLayout, read_layout, read_table, read_vector_words, read_vectors
from weft.data.word_vectors.write import vector_format, write_vectors
from weft.errors import ConfigError, DataError

QUICK = settings(
    max_examples=30, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None
)
GLOVE = "the 0.125 -0.5 1e-3\nof 1 2 3\nParis 4 5 6\nparis 7 8 9\n. . . 0.25 0.5 0.75\n"


@pytest.fixture
def write(tmp_path):
    def write(content, name="vectors.txt"):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return str(path)

    return write


def fails(path, *words):
    with pytest.raises(DataError) as caught:
        read_vectors(path, words)
    return str(caught.value)


# What is read


@pytest.mark.parametrize("header", ["", "5 3\n"])
@pytest.mark.parametrize("end", ["\n", " \n", "\r\n"])  # GloVe, word2vec, and what Windows makes of it
@pytest.mark.parametrize(
    ("name", "pack"),
    [("v.txt", bytes), ("v.vec.gz", gzip.compress), ("v.ZST", zstandard.ZstdCompressor().compress)],
    ids=["plain", "gz", "zst"],
)
def test_every_form_gives_the_same_rows(write, header, end, name, pack):
    path = write(pack((header + GLOVE).replace("\n", end).encode()), name)
    vectors = read_vectors(path, ["of", "nowhere", "the"])
    assert vectors.rows.dtype == np.float32
    np.testing.assert_array_equal(vectors.rows, np.array([[1, 2, 3], [0, 0, 0], [0.125, -0.5, 1e-3]], np.float32))
    assert vectors.in_file.tolist() == [True, False, True]
    assert read_layout(path) == VectorLayout(3, 5 if header else None)
    assert list(read_vector_words(path)) == ["the", "of", "Paris", "paris", ". . ."]


def test_a_word_is_looked_up_as_it_is_and_then_in_lower_case(write):
    lines = ["paris 1 1", "Paris 2 2", "oslo 3 3", "ROME 4 4"]
    requested = ["Paris", "paris", "PARIS", "Oslo", "rome", "Rome"]
    for order in (lines, lines[::-1]):  # whichever of them the file has first
        vectors = read_vectors(write("\n".join(order)), requested)
        assert vectors.rows[:, 0].tolist() == [2, 1, 1, 3, 0, 0]
        assert vectors.in_file.tolist() == [True, True, True, True, False, False]


def test_a_word_asked_for_twice_gets_both_rows_and_a_word_there_twice_counts_once(write):
    vectors = read_vectors(write("a 1 1\nb 2 2\na 3 3\n"), ["a", "b", "a"])
    assert vectors.rows[:, 0].tolist() == [1, 2, 1]


def test_words_may_have_spaces_and_odd_characters(write):
    path = write(
        "a 0.5 0.25\n. . . 1 2\nat name@domain.com 3 4\n\u2028 5 6\n\x85 7 8\n\u00a0 9 10\nwindows 3.1 11 12\n"
    )
    vectors = read_vectors(path, [". . .", "at name@domain.com", "\u2028", "\x85", "\u00a0", "windows 3.1", "at", "."])
    assert vectors.rows[:, 0].tolist() == [1, 3, 5, 7, 9, 11, 0, 0]


def test_a_word_may_be_a_number(write):
    assert read_vectors(write("2019 0.5 0.25\n7 1 2\n"), ["7", "2019"]).rows[:, 1].tolist() == [2, 0.25]


def test_an_empty_word_is_never_found(write):
    vectors = read_vectors(write("a 1 2\n 3 4\n"), ["", "a"])
    assert vectors.in_file.tolist() == [False, True]


def test_blank_lines_are_no_vectors(write):
    assert read_vectors(write("3 2\na 1 2\n\nb 3 4\nc 5 6\n\n"), ["b"]).rows.tolist() == [[3, 4]]


words = st.text(st.characters(codec="utf-8", exclude_characters="\n\r\0"), min_size=1, max_size=6).filter(
    lambda word: word.strip(" ") == word and not word.startswith("\ufeff")
)
numbers = st.floats(width=32, allow_nan=False, allow_infinity=False)


@QUICK
@given(st.data(), st.integers(2, 5))
def test_what_was_written_is_read(write, data, width):
    """Any words: the word `x 0.125` alone cannot be told from `x` with a number too many."""
    known = data.draw(st.lists(words.filter(lambda word: "." not in word), min_size=1, max_size=6, unique=True))
    rows = data.draw(st.lists(st.tuples(*[numbers] * width), min_size=len(known), max_size=len(known)))
    lines = [f"{len(known)} {width}"]
    lines += [" ".join([word, *(repr(float(number)) for number in row)]) for word, row in zip(known, rows, strict=True)]
    vectors = read_vectors(write("\n".join(lines)), known)
    assert vectors.in_file.all()
    np.testing.assert_array_equal(vectors.rows, np.array(rows, np.float32))


def test_only_the_rows_that_are_wanted_are_held(write):
    numbers = " ".join(["0.123456"] * 200)
    path = write("".join(f"word{n} {numbers}\n" for n in range(2000)))
    peaks = []
    for wanted in (["word7"], [f"word{n}" for n in range(2000)]):
        tracemalloc.start()
        assert read_vectors(path, wanted).in_file.all()
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[0] < 1 << 20
    assert peaks[1] > 3 << 19  # the negative control: 2,000 rows are seen


# What is refused


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("of 1.000 2.000", "2 numbers, where the first vector has 3: 'of 1.000 2.000'; mend"),
        ("of", "0 numbers, where the first vector has 3"),
        ("of 0.125 0.250 0.375 0.500", "4 numbers, where the first vector has 3"),
        ("of 0.125 0.250 0.375of 0.125 0.250 0.375", "5 numbers, where the first vector has 3"),
        ("of 1 two 3", "'two' is no number that float32 has; mend the line, or drop it"),
        ("of 1  3", "'' is no number"),
        ("of 1 nan 3", "'nan' is no number"),
        ("of 1 -inf 3", "'-inf' is no number"),
        ("of 1 1e39 3", "'1e39' is no number"),
    ],
)
@pytest.mark.parametrize("header", ["", "2 3\n"])
def test_a_bad_line_is_named(write, header, line, expected):
    path = write(f"{header}the 0.1 0.2 0.3\n{line}\n")
    place = f"{path}:{3 if header else 2}: "
    message = fails(path, "of", "the")
    assert message.startswith(place)
    assert expected in message


@pytest.mark.parametrize("line", ["of 1 2", "of 0.125 0.250 0.375 0.500"])
def test_the_width_of_every_line_is_checked_though_it_is_not_wanted(write, line):
    assert "where the first vector has 3" in fails(write(f"the 0.1 0.2 0.3\n{line}\n"), "the")


def test_the_numbers_of_a_line_that_is_not_wanted_are_not_looked_into(write):
    assert read_vectors(write("the 1 2\nof x y\n"), ["the"]).in_file.all()


def test_a_file_with_fewer_vectors_than_it_promises_is_cut_short(write):
    message = fails(write("3 2\na 1 2\nb 3 4\n"), "a")
    assert "its first line promises 3 vectors, but it has 2; is it cut short?" in message
    assert "promises 1 vector, but it has 0" in fails(write("1 2\n"), "a")


def test_a_file_of_something_else_is_refused(write, tmp_path):
    assert "is empty; a file of word vectors has" in fails(write(""))
    assert ":1: no word vector: a line is a word and its numbers" in fails(write("Call me Ishmael.\n"))
    assert "if it is word2vec's binary form, let its name end in .bin" in fails(
        write(b"1 2\nthe \x00\x00\x80?\n"), "the"
    )
    assert "there is no such file" in fails(str(tmp_path / "nowhere.txt"))
    assert "is a directory" in fails(str(tmp_path))
    assert "cannot be read" in fails(write(gzip.compress(GLOVE.encode() * 99)[:-20], "cut.gz"), "the")


def test_a_line_past_the_limit_is_not_held(write):
    with pytest.raises(DataError, match="more than 50 bytes"):
        read_vectors(write("a 1 2\n" + "b" * 100 + " 1 2\n"), ["a"], limit=50)


# The binary form, what is written, and gensim's reading of it


FORMS = ("v.txt", "v.bin", "v.glove", "v.txt.gz", "v.bin.gz")


def some(count=7, width=5, seed=0):
    rng = np.random.default_rng(seed)
    known = ["the", "Paris", "naïve", "東京", "…", "0.5", "x" * 300, *(f"word{n}" for n in range(count))][:count]
    return known, (rng.normal(0, 1, (count, width)) * 10.0 ** rng.integers(-9, 9, (count, 1))).astype(np.float32)


def binary(known, rows, between=b""):
    return f"{len(known)} {rows.shape[1]}\n".encode() + b"".join(
        word.encode() + b" " + row.tobytes() + between for word, row in zip(known, rows, strict=True)
    )


@pytest.mark.parametrize("name", FORMS)
def test_what_is_written_is_read_back_to_the_bit(tmp_path, name):
    known, rows = some()
    path = str(tmp_path / name)
    write_vectors(path, known, rows)
    assert read_layout(path) == VectorLayout(5, None if "glove" in name else 7)
    assert list(read_vector_words(path)) == known
    words, table = read_table(path)
    assert words == known
    np.testing.assert_array_equal(table, rows)
    np.testing.assert_array_equal(read_vectors(path, ["東京", "nowhere", "THE"]).rows, [rows[3], [0] * 5, rows[0]])
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")  # gensim's
@pytest.mark.parametrize("name", ["v.txt", "v.bin", "v.glove", "v.txt.gz"])
def test_gensim_reads_what_is_written(tmp_path, name):
    from gensim.models import KeyedVectors

    known, rows = some()
    path = str(tmp_path / name)
    write_vectors(path, known, rows)
    keyed = KeyedVectors.load_word2vec_format(path, binary=".bin" in name, no_header="glove" in name)
    assert keyed.index_to_key == known
    np.testing.assert_array_equal(keyed.vectors, rows)


@pytest.mark.parametrize("name", ["v.txt", "v.bin", "v.txt.gz", "v.glove"])
def test_what_gensim_writes_is_read(tmp_path, name):
    from gensim.models import KeyedVectors

    known, rows = some()
    peer = KeyedVectors(5)
    peer.add_vectors(known, rows)
    path = str(tmp_path / name)
    peer.save_word2vec_format(path, binary=".bin" in name, write_header="glove" not in name)
    words, table = read_table(path)
    assert words == known
    np.testing.assert_array_equal(table, rows)


@pytest.mark.parametrize("between", [b"", b"\n"])  # gensim's, and that of word2vec's own code
def test_the_binary_form_with_and_without_line_ends(write, between):
    known, rows = some()
    path = write(binary(known, rows, between), "v.bin")
    np.testing.assert_array_equal(read_table(path)[1], rows)
    assert read_table(path, most=2)[0] == known[:2]


def test_the_first_of_two_counts_in_a_table(write):
    assert read_table(write("a 1 1\nb 2 2\na 3 3\n"))[1].tolist() == [[1, 1], [2, 2]]


def test_only_the_rows_that_are_wanted_are_held_of_the_binary_form(write):
    rows = np.ones((4000, 200), np.float32)
    path = write(binary([f"w{n}" for n in range(4000)], rows), "v.bin")
    tracemalloc.start()
    assert read_vectors(path, ["w7"]).in_file.all()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < rows.nbytes / 3


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"the 0.1 0.2\n", "begins with a line of two numbers"),
        (b"", "begins with a line of two numbers"),
        (b"2 0\n", "begins with a line of two numbers"),
        (binary(["a", "b"], np.ones((2, 4), np.float32))[:-1], "promises 2 vectors, but it ends in number 2"),
        (b"3 1\na \0\0\0\0b \0\0\0\0", "vector 3: its word has no end"),
        (b"1 1\n\xff\xfe \0\0\0\0", "its word is not UTF-8"),
        (binary(["a"], np.full((1, 2), np.nan, np.float32)), "has what is no number"),
    ],
)
def test_a_bad_binary_file_is_named(write, content, expected):
    path = write(content, "v.bin")
    message = fails(path, "a")
    assert message.startswith(path)
    assert expected in message


def test_a_missing_binary_file_is_named(tmp_path):
    assert "there is no such file" in fails(str(tmp_path / "v.bin"), "a")


@pytest.mark.parametrize(
    ("word", "expected"), [("two words", "has a space in it"), ("", "is empty"), ("a\nb", "a space")]
)
@pytest.mark.parametrize("name", ["v.txt", "v.bin"])
def test_a_word_that_no_reader_could_tell_is_not_written(tmp_path, name, word, expected):
    with pytest.raises(DataError, match=expected):
        write_vectors(str(tmp_path / name), ["fine", word], np.ones((2, 2), np.float32))
    assert list(tmp_path.iterdir()) == []  # nothing is left half written


def test_what_is_no_number_is_not_written(tmp_path):
    with pytest.raises(DataError, match="'b': its vector has what is no number"):
        write_vectors(str(tmp_path / "v.txt"), ["a", "b"], np.array([[1.0], [np.inf]], np.float32))


def test_the_form_goes_by_the_ending_or_as_asked(tmp_path):
    forms = {"v.txt": "word2vec", "v.vec.gz": "word2vec", "V.BIN": "binary", "v.glove": "glove"}
    assert {name: vector_format(name) for name in forms} == forms
    assert vector_format("v.xyz", "glove") == "glove"
    with pytest.raises(ConfigError, match="v.xyz: its ending does not say"):
        vector_format("v.xyz")
    with pytest.raises(ConfigError, match="did you mean 'binary'"):
        vector_format("v.txt", "binry")
    with pytest.raises(DataError, match="cannot be written"):
        write_vectors(str(tmp_path / "nowhere" / "v.txt"), ["a"], np.ones((1, 1), np.float32))
