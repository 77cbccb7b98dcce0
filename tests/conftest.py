"""Hypothesis draws the same examples in every run, and how fast it is fails no test."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile(
    "edgetrain",
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("edgetrain")
