"""Lets `python -m device_agent` do what `edgetrain-agent` does."""

from __future__ import annotations

import sys

from device_agent.cli import main

if __name__ == "__main__":
    sys.exit(main())
