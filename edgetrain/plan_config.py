"""The part of the run file that says how the model is cut and placed."""

from __future__ import annotations

import math
from typing import Final, Literal

from edgetrain.codec_spec import RAW, CodecConfig
from edgetrain.settings import Section, require
from edgetrain.train_config import AUTO

ALL: Final = "all"


class PinConfig(Section, frozen=True):
    """Devices that must have the first or the last stage."""

    first: str | None = None
    last: str | None = None


class PlanConfig(Section, frozen=True):
    """``[plan]``.

    Attributes:
        stages: how many; ``"auto"``: as many as make the shortest step, or one more than
            `cuts`; ``"all"``: one a device.
        cuts: in order, each a tensor's name, or the names of all tensors that cross it.
        pin: fixed places.
        recompute: whether exact stages keep only what they received and run their forward
            again in their backward: the least memory, for about one more forward a step;
            ``"auto"``: those that would not fit otherwise.
        replan: whether stages may move in mid-run, when devices have become slower or
            faster and it pays; only where all stages are exact, no codec keeps anything
            from one tensor to the next, and `cuts` is left out.
        codec: what tensors travel in: one for all, or one for each cut.
        target_step_s: what a step should take, where a codec is ``"adaptive"``.
    """

    stages: int | str = AUTO
    cuts: tuple[str | tuple[str, ...], ...] = ()
    pin: PinConfig = PinConfig()
    recompute: bool | Literal["auto"] = "auto"
    replan: bool = True
    codec: str | CodecConfig | tuple[str | CodecConfig, ...] = RAW
    target_step_s: float | None = None

    def codec_of(self, cut: int) -> CodecConfig:
        """What is asked for one cut, by direction."""
        asked = self.codec[cut] if isinstance(self.codec, tuple) else self.codec
        return CodecConfig(asked, asked) if isinstance(asked, str) else asked

    def __post_init__(self) -> None:
        self._check_codecs()
        if isinstance(self.stages, str):
            require(
                self.stages in (AUTO, ALL),
                f"[plan] stages = {self.stages!r}: write a number, 'auto' or 'all'",
            )
            return
        require(self.stages > 0, f"[plan] stages = {self.stages}: must be 1 or more")
        require(
            not self.cuts or len(self.cuts) == self.stages - 1,
            f"[plan] stages = {self.stages} needs {self.stages - 1} cuts, {len(self.cuts)}"
            " are given: leave out one of the two keys",
        )

    def _check_codecs(self) -> None:
        count = len(self.codec) if isinstance(self.codec, tuple) else 1
        if isinstance(self.codec, tuple):
            stages = self.stages if isinstance(self.stages, int) else len(self.cuts) + 1
            require(
                count == stages - 1,
                f"[plan] codec lists {count} codecs: it takes one for each cut, so give as"
                " many `cuts`, or `stages` as a number; or write one codec for all",
            )
        adaptive = any(self.codec_of(cut).adaptive for cut in range(count))
        require(
            not adaptive or 0 < (self.target_step_s or 0) < math.inf,
            "[plan] codec = 'adaptive' needs target_step_s, above 0: what a step should"
            " take, in seconds",
        )
