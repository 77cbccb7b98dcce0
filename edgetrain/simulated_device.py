"""The run file's ``[fleet] simulate``: devices that are processes on this machine."""

from __future__ import annotations

from edgetrain.abilities import ABILITIES
from edgetrain.conditions import Conditions
from edgetrain.settings import check_device_name, choose, size_bytes
from edgetrain.train_config import AUTO, GRADIENTS


class SimulatedDevice(Conditions, frozen=True, kw_only=True):
    """A device that the coordinator starts as a process on this machine.

    Attributes:
        gradient: what it can do: ``"auto"`` all, ``"hybrid"`` plain inference only.
        memory: bytes, or text such as ``"512 MB"``; None: no limit.
        runs: what its engine runs beside plain forwards, of `ABILITIES`.
    """

    name: str
    gradient: str = AUTO
    memory: int | str | None = None
    runs: tuple[str, ...] = ABILITIES

    def __post_init__(self) -> None:
        check_device_name("[fleet] simulate", self.name)
        place = f"[fleet] simulate {self.name!r}:"
        choose(f"{place} gradient", self.gradient, GRADIENTS)
        for word in self.runs:
            choose(f"{place} runs", word, ABILITIES)
        if self.memory is not None:
            size_bytes(f"{place} memory", self.memory)
        self.check(place)

    @property
    def memory_bytes(self) -> int | None:
        return None if self.memory is None else size_bytes("memory", self.memory)

    @property
    def conditions(self) -> Conditions:
        """Speed, link and timetable on their own."""
        return Conditions(
            **{key: getattr(self, key) for key in Conditions.__struct_fields__}
        )
