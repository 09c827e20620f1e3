"""Decoding options of a recipe and of each call: greedy search, sampling or beam search, lengths, repetition."""

from collections.abc import Collection
from typing import Annotated, Literal

from pydantic import Field, model_validator

from weft.config.schema import Section
from weft.decoding.beam_search import EarlyStopping
from weft.errors import ConfigError

SAMPLING_OPTIONS = ("temperature", "top_k", "top_p", "seed")  # without effect unless `sample` is true
RANKING_OPTIONS = ("length_penalty", "alpha")  # without effect unless several hypotheses are ranked


class DecodingConfig(Section):
    """Decoding options: part of a task's recipe and of each call."""

    beam: int = Field(1, ge=1, le=1000)  # 1: greedy, or sampled
    # Hypotheses returned a sequence: the best of the beam, or independent samples.
    num_return_sequences: int = Field(1, ge=1, le=20_000)  # answers: the best of the beam, or so many samples
    length_penalty: Literal["none", "gnmt", "average"] = "gnmt"  # what a score is divided by
    alpha: float = Field(0.6, ge=0, le=10)  # of the length penalty; average with 1 is the mean a token
    max_length: int = Field(256, ge=1, le=100_000)  # tokens produced, eos included
    min_length: int = Field(0, ge=0)  # tokens produced before eos is allowed
    finish: bool = False  # whether a text is ended with eos at max_length, rather than cut off
    renormalize_logits: bool = False  # whether probabilities are renormalized without the forbidden tokens
    early_stopping: EarlyStopping = "sure"  # of a beam search (weft.decoding.beam_search)
    repetition_penalty: float = Field(1.0, ge=0.01, le=100)  # of tokens read or written before; 1: none
    no_repeat_ngram_size: int = Field(0, ge=0, le=100_000)  # n-grams of this size occur once; 0: any number of times
    bad_words: tuple[Annotated[str, Field(min_length=1)], ...] = ()  # texts whose tokens are never written
    sample: bool = False  # draw tokens rather than take the best
    temperature: float = Field(1.0, gt=0, le=100, allow_inf_nan=False)  # below 1 sharper, above 1 flatter
    top_k: int | None = Field(None, ge=1)  # draw from the k best tokens
    top_p: float | None = Field(None, gt=0, le=1)  # draw from the best tokens of at least this probability in all
    seed: int = Field(0, ge=0)  # of the draws

    @model_validator(mode="after")
    def _check_consistency(self) -> "DecodingConfig":
        if self.sample and self.beam > 1:
            raise ValueError(
                f"sample draws and beam searches, so sample needs beam: 1, but beam is {self.beam} instead; "
                "set sample: false, or leave beam out"
            )
        if not self.sample and self.num_return_sequences > self.beam:
            raise ValueError(
                "num_return_sequences must be at most beam, unless sample is true: got "
                f"{self.num_return_sequences} and {self.beam}; try beam: {self.num_return_sequences}"
            )
        if self.min_length > self.max_length:
            raise ValueError(f"min_length must be at most max_length: got {self.min_length} and {self.max_length}")
        return self

    def check_effective(self, section: str, given: Collection[str] | None = None) -> None:
        """Raise an error for an option that this search ignores, unless it has its default value.

        `given` are the keys to check: those of a call, which need not answer for what the recipe sets; None: all.
        """
        fields = type(self).model_fields
        for key, reason in self._without_effect().items():
            value = getattr(self, key)
            if (given is None or key in given) and value != fields[key].default:
                raise ConfigError(f"{section}.{key}: {value!r} has no effect: {reason}, or leave {key} out")

    def _without_effect(self) -> dict[str, str]:
        """Return the keys that this search ignores, each with the reason and the remedy."""
        reasons: dict[str, str] = {}
        if not self.sample:
            reasons |= dict.fromkeys(SAMPLING_OPTIONS, "sample is false, so nothing is drawn; set sample: true")
        if self.beam == 1:
            reasons["early_stopping"] = "beam is 1, so it is no beam search; set beam: 4, say"
        if self.length_penalty == "none":
            reasons["alpha"] = "length_penalty is none; set it to gnmt or average"
        if self.beam == self.num_return_sequences == 1:
            remedy = "num_return_sequences: 2" if self.sample else "beam: 4"
            ranking = f"beam and num_return_sequences are 1, so no hypotheses are ranked; set {remedy}, say"
            reasons |= dict.fromkeys(RANKING_OPTIONS, ranking)
        return reasons

    def describe_sampling(self) -> str:
        """Return the settings of the draws in words, such as "temperature 0.7, top_p 0.95, seed 0"."""
        values = {key: getattr(self, key) for key in SAMPLING_OPTIONS}
        return ", ".join(f"{key} {value}" for key, value in values.items() if value is not None)

    @property
    def graph_compatible(self) -> bool:
        """Return whether the search can run as CUDA graphs (weft.decoding.cuda_graph)."""
        uses_history = self.repetition_penalty != 1 or self.no_repeat_ngram_size or self.bad_words
        return self.early_stopping == "sure" and not (self.renormalize_logits or self.finish or uses_history)

    def penalty(self, length: int) -> float:
        """Return lp, the divisor of a log-probability: gnmt is Wu et al. 2016, eq. 14. `length` counts eos."""
        base = {"none": 1.0, "gnmt": (5 + length) / 6, "average": float(length)}[self.length_penalty]
        return float(base**self.alpha)
