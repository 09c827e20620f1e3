"""Unknown words of a source, numbered so that a model can copy them into its target.

See, Liu & Manning 2017, section 2.2, extend the vocabulary for each source by the words that it lacks. Here this is
done with tokens that the vocabulary has for all texts (`Tokenizer.unknown_slots`): <unk:0> is the first unknown word of
a source, wherever it stands in source and target, <unk:1> the second different one. To a model they are tokens as
others: it has embeddings of them, and may generate them, too.
"""

from collections.abc import Sequence

from weft.tokenization.trainable import UNKNOWN_SLOT, Encoding, Tokenizer


def unknown_words(tokenizer: Tokenizer, text: str, encoding: Encoding | None = None) -> list[str]:
    """Return the unknown words of a text in the order of their slots, as many as there are slots."""
    if not tokenizer.unknown_slots:
        return []
    words = (word for _, word in _unknown(tokenizer, text, encoding or tokenizer.encode(text)))
    return list(dict.fromkeys(words))[: len(tokenizer.unknown_slots)]


def numbered_ids(
    tokenizer: Tokenizer, source: str, targets: Sequence[str], needed: int | None = None
) -> tuple[list[int], list[list[int]]]:
    """Return the ids of a source and of its targets, with slots in place of the source's unknown words."""
    encoding = tokenizer.encode(source, needed)
    slots = dict(zip(unknown_words(tokenizer, source, encoding), tokenizer.unknown_slots, strict=False))

    def ids(text: str, encoding: Encoding) -> list[int]:
        numbered = {index: slots[word] for index, word in _unknown(tokenizer, text, encoding) if word in slots}
        return [numbered.get(index, id) for index, id in enumerate(encoding.ids)]

    return ids(source, encoding), [ids(text, tokenizer.encode(text, needed)) for text in targets]


def with_unknown_words(tokenizer: Tokenizer, text: str, words: Sequence[str]) -> str:
    """Return a decoded text with words in place of the tokens of slots; a slot without a word is the unknown token."""
    if not tokenizer.unknown_slots:
        return text
    unknown = tokenizer.special_tokens_map(tokenizer.config)["unk"]
    tokens = {UNKNOWN_SLOT.format(number): unknown for number in range(len(tokenizer.unknown_slots))}
    tokens |= {UNKNOWN_SLOT.format(number): word for number, word in enumerate(words)}
    return " ".join(tokens.get(token, token) for token in text.split(" "))


def _unknown(tokenizer: Tokenizer, text: str, encoding: Encoding) -> list[tuple[int, str]]:
    """Return the index and the word of each unknown token, in lower case where the tokenizer reads it so."""
    spans = enumerate(zip(encoding.ids, encoding.offsets, strict=True))
    words = ((index, text[a:b]) for index, (id, (a, b)) in spans if id == tokenizer.specials.unk)
    return [(index, word.lower() if tokenizer.config.lowercase else word) for index, word in words]
