"""What an inference engine may run beside plain forwards of constant weights."""

from __future__ import annotations

from typing import Final

BACKWARD: Final = "backward"
JVP: Final = "jvp"
WEIGHTS: Final = "weights"
# backward: the graphs of gradients. jvp: those that push tangents forward. weights: any
# graph whose weights are inputs, and may change between two runs.
ABILITIES: Final = (BACKWARD, JVP, WEIGHTS)
