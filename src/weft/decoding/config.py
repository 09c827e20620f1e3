"""Decoding options of a recipe and of each call: greedy search, sampling or beam search, lengths, length penalty."""

from typing import Literal

from pydantic import Field, model_validator

from weft.config.schema import Section
from weft.decoding.beam_search import EarlyStopping


class DecodingConfig(Section):
    """Decoding options: part of a task's recipe and of each call."""

    beam: int = Field(1, ge=1)  # 1: greedy, or sampled
    # Hypotheses returned a sequence: the best of the beam, or independent samples.
    num_return_sequences: int = Field(1, ge=1)
    length_penalty: Literal["none", "gnmt", "average"] = "gnmt"
    alpha: float = Field(0.6, ge=0, le=10)  # of the length penalty; average with 1 is the mean a token
    max_length: int = Field(256, ge=1, le=100_000)  # tokens produced, eos included
    min_length: int = Field(0, ge=0)  # tokens produced before eos is allowed
    finish: bool = False  # whether a text is ended with eos at max_length, rather than cut off
    renormalize_logits: bool = False  # whether probabilities are renormalized without the forbidden tokens
    early_stopping: EarlyStopping = "sure"  # of a beam search (weft.decoding.beam_search)
    sample: bool = False
    temperature: float = Field(1.0, gt=0, allow_inf_nan=False)
    top_k: int | None = Field(None, ge=1)
    top_p: float | None = Field(None, gt=0, le=1)
    seed: int = Field(0, ge=0)

    @model_validator(mode="after")
    def _check_consistency(self) -> "DecodingConfig":
        if self.sample and self.beam > 1:
            raise ValueError(
                f"sample draws and beam searches, so sample needs beam: 1, but beam is {self.beam} instead"
            )
        if not self.sample and self.num_return_sequences > self.beam:
            raise ValueError(
                "num_return_sequences must be at most beam, unless sample is true: got "
                f"{self.num_return_sequences} and {self.beam}; try beam: {self.num_return_sequences}"
            )
        if self.min_length > self.max_length:
            raise ValueError(f"min_length must be at most max_length: got {self.min_length} and {self.max_length}")
        return self

    @property
    def graph_compatible(self) -> bool:
        """Return whether the search can run as CUDA graphs (weft.decoding.cuda_graph)."""
        return self.early_stopping == "sure" and not (self.renormalize_logits or self.finish)

    def penalty(self, length: int) -> float:
        """Return lp, the divisor of a log-probability: gnmt is Wu et al. 2016, eq. 14. `length` counts eos."""
        base = {"none": 1.0, "gnmt": (5 + length) / 6, "average": float(length)}[self.length_penalty]
        return float(base**self.alpha)
