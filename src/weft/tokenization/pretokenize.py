"""Plain text to words, for tasks that speak of words."""

from tokenizers import Regex, pre_tokenizers

from weft.tokenization.word_counts import check_text

_CUT = pre_tokenizers.Sequence(
    [pre_tokenizers.Split(Regex(r"\s+"), "removed"), pre_tokenizers.Split(Regex(r"[^\w\s]"), "isolated")]
)


def split_words(text: str) -> list[str]:
    """Cut at spaces and around every sign that is no letter, mark, digit or "_", as the tokenizer `words` does."""
    check_text(text)
    return [word for word, _ in _CUT.pre_tokenize_str(text)]
