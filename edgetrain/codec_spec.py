"""Which codec a cut's tensors travel in, as it is asked for and as it is deployed."""

from __future__ import annotations

from typing import Final

import msgspec

from edgetrain.errors import ConfigError
from edgetrain.settings import Section

AUTO: Final = "auto"  # for the planner to choose
RAW: Final = "raw"
ADAPTIVE: Final = "adaptive"
SHARED: Final = ("topk", "topk8")  # those that send a share of the entries
USUAL_SHARE: Final = 0.1
NAMES: Final = (RAW, "bf16", "int8", "int4", *SHARED, "sparse", ADAPTIVE)
LOSSLESS: Final = (RAW, "sparse")


class CodecSpec(msgspec.Struct, frozen=True):
    """One codec; `share` of a tensor's entries is sent, where the codec sends but a share.

    Written as its name, with the share behind a colon: ``int8``, ``topk:0.05``.
    """

    name: str = RAW
    share: float = 1.0

    def __post_init__(self) -> None:
        if self.name not in NAMES:
            raise ValueError(f"codec {self.name!r} is not one of {', '.join(NAMES)}")
        if not 0 < self.share <= 1 or (self.share < 1 and self.name not in SHARED):
            raise ValueError(
                f"codec {self.name!r} with a share of {self.share:g}: {', '.join(SHARED)}"
                " take one above 0 and up to 1, others none"
            )

    @classmethod
    def parse(cls, text: str) -> CodecSpec:
        """Read one as it is written.

        Raises:
            ValueError: it is none.
        """
        name, colon, share = text.partition(":")
        if not colon:
            return cls(name, USUAL_SHARE if name in SHARED else 1.0)
        try:
            return cls(name, float(share))
        except ValueError as error:
            raise ValueError(f"codec {text!r}: {error}") from error

    @property
    def lossless(self) -> bool:
        return self.name in LOSSLESS

    @property
    def feedback(self) -> bool:
        """Whether a sender of cotangents adds what it left out to the next ones."""
        return self.name in SHARED

    def __str__(self) -> str:
        return f"{self.name}:{self.share:g}" if self.name in SHARED else self.name


class CutCodecs(msgspec.Struct, frozen=True):
    """Of one cut: what its activations and its cotangents travel in."""

    activations: CodecSpec = CodecSpec()
    cotangents: CodecSpec = CodecSpec()

    @property
    def feedback(self) -> bool:
        """Whether a sender keeps something from one tensor to the next."""
        return self.cotangents.feedback


class CodecConfig(Section, frozen=True):
    """``[plan] codec`` of a cut, by direction: each a codec, or ``"auto"``."""

    activations: str = RAW
    cotangents: str = RAW

    def __post_init__(self) -> None:
        for text in (self.activations, self.cotangents):
            if text == AUTO:
                continue
            try:
                CodecSpec.parse(text)
            except ValueError as error:
                raise ConfigError(f"[plan] {error}, nor 'auto'") from error

    @property
    def adaptive(self) -> bool:
        return ADAPTIVE in (self.activations, self.cotangents)
