"""Pre-tokenization: plain text to words, for word-level tasks."""

from tokenizers import Regex, pre_tokenizers

from weft.tokenization.word_counts import check_text

_PRE_TOKENIZER = pre_tokenizers.Sequence(
    [pre_tokenizers.Split(Regex(r"\s+"), "removed"), pre_tokenizers.Split(Regex(r"[^\w\s]"), "isolated")]
)


def split_words(text: str) -> list[str]:
    r"""Return the words of a text, split at whitespace and around each non-\w character, as tokenizer `words` does."""
    check_text(text)
    return [word for word, _ in _PRE_TOKENIZER.pre_tokenize_str(text)]
