"""Characters by their definition: window by window and word by word in float64, with a batch's padding nowhere near."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from weft.errors import ConfigError
from weft.models.rnn import RNN, RNNConfig
from weft.nn.layers.char_cnn import CharCNN
from weft.testing import check_model
from weft.tokens import CHAR_PAD, MAX_WORD_CHARS, NUM_CHARS, WORD_BEGIN, WORD_END, Tokens, char_ids

quick = settings(deadline=None, derandomize=True, max_examples=20)
words = st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=8), min_size=1, max_size=6)


def spelt(*sentences: list[str]) -> Tokens:
    tokens = Tokens.pack([list(range(len(sentence))) for sentence in sentences])
    return tokens.with_chars([char_ids(sentence) for sentence in sentences])


def made(filters: int = 5, kernel: int = 3) -> CharCNN:
    torch.manual_seed(0)
    return CharCNN(filters, kernel, embedding=4).double()


def feature(cnn: CharCNN, word: str) -> Tensor:
    """r, term by term: each filter at each character, and what lies outside the word left out."""
    signs = [WORD_BEGIN, *word.encode("utf-8"), WORD_END]
    weight, bias, found = cnn.convolve.weight, cnn.convolve.bias, []
    reach = weight.shape[-1] // 2
    for centre in range(len(signs)):
        score = bias
        for offset in range(-reach, reach + 1):
            if 0 <= centre + offset < len(signs):
                score = score + weight[:, :, offset + reach] @ cnn.embed.weight[signs[centre + offset]]
        found.append(score)
    return torch.stack(found).max(0).values.clamp(min=0)


def check_definition(cnn: CharCNN, sentences: list[list[str]]) -> None:
    actual = cnn(spelt(*sentences))
    expected = torch.stack([feature(cnn, word) for sentence in sentences for word in sentence])
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)
    weights = list(cnn.parameters())
    pull = torch.randn_like(expected)
    for mine, theirs in zip(
        *(torch.autograd.grad((out * pull).sum(), weights) for out in (actual, expected)), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kernel", [1, 3, 5])
def test_the_definition_on_a_ragged_batch(kernel):
    check_definition(made(kernel=kernel), [["Monday", "", "a"], ["naïve", "日本語", "aaaa", "a"], ["Monday"]])


@quick
@given(words)
def test_the_definition_on_any_words(sentence):
    check_definition(made(), [sentence])


class Leaking(CharCNN):
    """The padding's own windows may win, and see the word's end."""

    def forward(self, tokens: Tokens) -> Tensor:
        assert tokens.chars is not None
        return self.convolve(self.embed(tokens.chars).transpose(1, 2)).amax(-1).relu()


class Learning(CharCNN):
    """The padding has an embedding like any other sign."""

    def __init__(self, filters: int, kernel: int, embedding: int) -> None:
        super().__init__(filters, kernel, embedding)
        self.embed.padding_idx = None
        torch.nn.init.normal_(self.embed.weight)


@pytest.mark.parametrize("kind", [Leaking, Learning])
def test_padding_that_leaks_is_caught(kind):
    torch.manual_seed(0)
    with pytest.raises(AssertionError, match="not close"):
        check_definition(kind(5, 3, 4).double(), [["Monday", "", "a"]])


@quick
@given(words, st.integers(0, 5))
def test_a_word_alone_is_as_in_any_batch(sentence, place):
    cnn, word = made(), sentence[place % len(sentence)]
    together = cnn(spelt(sentence, ["a much longer word than all others"]))[place % len(sentence)]
    torch.testing.assert_close(cnn(spelt([word]))[0], together, rtol=1e-12, atol=1e-12)


def test_words_that_differ_in_case_or_an_ending_differ():
    cnn = made(30)
    apple, capital, plural = cnn(spelt(["apple", "Apple", "apples"]))
    assert not torch.equal(apple, capital)
    assert not torch.equal(apple, plural)


def test_tokens_without_a_spelling_are_refused():
    with pytest.raises(ConfigError, match=r"model.chars: the tokens come without their spelling.*tag and classify"):
        made()(Tokens.pack([[1, 2]]))


def test_no_token_has_no_feature():
    assert made()(spelt([])).shape == (0, 5)


def test_the_padding_stays_zero_in_training():
    cnn = made()
    assert not cnn.embed.weight[CHAR_PAD].any()
    cnn(spelt(["a", "Monday"])).sum().backward()
    assert not cnn.embed.weight.grad[CHAR_PAD].any()
    assert cnn.embed.weight.grad[ord("M")].any()
    assert len(cnn.embed.weight) == NUM_CHARS == CHAR_PAD + 1


# Spelling


def test_a_spelling_is_bytes_between_two_signs():
    assert char_ids(["ab", "", "é"]).tolist() == [
        WORD_BEGIN,
        97,
        98,
        WORD_END,
        WORD_BEGIN,
        WORD_END,
        WORD_BEGIN,
        0xC3,
        0xA9,
        WORD_END,
    ]
    chars = spelt(["ab", ""], ["é"]).chars
    assert chars.tolist() == [
        [WORD_BEGIN, 97, 98, WORD_END],
        [WORD_BEGIN, WORD_END, CHAR_PAD, CHAR_PAD],
        [WORD_BEGIN, 0xC3, 0xA9, WORD_END],
    ]


def test_a_very_long_word_is_known_by_its_beginning():
    long, longer = spelt(["x" * 48]).chars, spelt(["x" * 48 + "y" * 100]).chars
    assert torch.equal(long, longer)
    assert longer.shape == (1, MAX_WORD_CHARS)
    assert not torch.equal(spelt(["x" * 47]).chars, spelt(["x" * 47 + "y"]).chars)


@quick
@given(words)
def test_every_token_is_spelt_at_its_place(sentence):
    tokens = spelt(sentence, [], sentence[::-1])
    for row, word in zip(tokens.chars.tolist(), [*sentence, *sentence[::-1]], strict=True):
        signs = [sign for sign in row if sign != CHAR_PAD]
        assert bytes(signs[1:-1]) == word.encode("utf-8")[:48]
        assert row == [*signs, *[CHAR_PAD] * (len(row) - len(signs))]


def test_a_spelling_too_few_is_our_own_bug():
    with pytest.raises(AssertionError, match="characters for every token"):
        Tokens.pack([[1, 2]]).with_chars([char_ids(["one"])])


# A model that spells


@pytest.mark.parametrize(
    "config",
    [{"direction": "forward"}, {"direction": "both", "layers": 2, "residual": True}, {"direction": "backward"}],
    ids=lambda config: config["direction"],
)
def test_a_recurrent_model_that_spells_keeps_every_property(config):
    held = check_model(RNN, {"width": 8, "embedding": 5, "chars": 3, **config})
    assert "a sequence alone answers as in any batch" in held
    assert "start and step agree with reading all at once" not in held  # it only encodes


@pytest.mark.usefixtures("wide_bound")
def test_check_model_finds_a_spelling_that_leaks():
    class Padded(RNN):
        def __init__(self, config, vocab, target_vocab=None):
            super().__init__(config, vocab, target_vocab)
            self.chars = Learning(config.chars, 3, 30)

    with pytest.raises(AssertionError, match="not so: a sequence alone answers as in any batch"):
        check_model(Padded, {"width": 8, "chars": 3})


def test_without_chars_the_weights_are_as_ever():
    names = {name for name, _ in RNN(RNNConfig(name="rnn", width=8), 7).named_parameters()}
    assert not any(name.startswith("chars") for name in names)
    assert "output.weight" in names


def test_layer_0_is_the_embedding_and_the_spelling_side_by_side():
    model = RNN(RNNConfig(name="rnn", width=8, embedding=5, chars=3), 7).eval()
    tokens = Tokens.pack([[1, 2, 1]]).with_chars([char_ids(["one", "two", "one"])])
    embedded = model.encode(tokens, layers=(0,))[0]
    assert torch.equal(embedded[:, :5], model.embed(tokens.ids))
    torch.testing.assert_close(embedded[0], embedded[2], rtol=0, atol=1e-6)  # rows of one product, of a few units
    assert not torch.allclose(embedded[0], embedded[1], rtol=0, atol=1e-3)
