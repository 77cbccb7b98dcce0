"""Runs a broker until standard input closes: so it never outlives whoever started it.

Run as a file, by `edgetrain.transport.broker`, and free of imports from the package.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable


def _when_parent_is_gone(end: Callable[[], None]) -> None:
    def watch() -> None:
        while os.read(0, 1):
            pass
        end()

    threading.Thread(target=watch, daemon=True).start()


def _run_program(command: list[str]) -> int:
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL)  # noqa: S603
    _when_parent_is_gone(process.terminate)
    return process.wait()


def _run_iotcore(config_path: str) -> int:
    from iotcore import IotCoreBroker  # noqa: PLC0415  another broker may be used instead

    # It logs every packet it routes as an error.
    logging.getLogger("rumqttd").setLevel(logging.CRITICAL)
    _when_parent_is_gone(lambda: os._exit(0))
    broker = IotCoreBroker(config_path=config_path)
    broker.check_ports()
    broker.run_forever()
    return 0


if __name__ == "__main__":
    kind, config_path, *command = sys.argv[1:]
    if kind == "iotcore":
        sys.exit(_run_iotcore(config_path))
    sys.exit(_run_program([*command, config_path]))
