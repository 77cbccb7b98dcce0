"""The options that several commands of `edgetrain` share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

from edgetrain.losses import LOSSES

RunFile = Annotated[
    Path, typer.Argument(metavar="RUN.toml", help="What to train, and how.")
]
Model = Annotated[Path, typer.Argument(metavar="MODEL", help="An ONNX file.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Out = Annotated[
    Path | None, typer.Option("--out", metavar="DIR", help="A new or empty folder.")
]
_LOSS: Final = typer.Option("--loss", metavar="NAME", help=f"One of {', '.join(LOSSES)}.")
Loss = Annotated[str, _LOSS]
Assignments = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="K=V", help="Such as train.lr=0.1; repeatable."),
]
Trace = Annotated[
    Path | None,
    typer.Option("--trace", metavar="FILE", help="Write it for ui.perfetto.dev."),
]
AnyLoss = Annotated[str | None, _LOSS]
LossOption = Annotated[
    list[str] | None,
    typer.Option("--loss-option", metavar="K=V", help="Such as delta=0.5; repeatable."),
]
LossOutput = Annotated[
    str | None, typer.Option("--output", help="The output the loss applies to.")
]
Namespace = Annotated[
    str | None, typer.Option("--namespace", help="First word of all topics.")
]
BrokerUrl = Annotated[
    str | None, typer.Option("--broker", metavar="URL", help="mqtts://host:8883")
]
FleetFile = Annotated[
    Path | None,
    typer.Option("--fleet", metavar="FILE", help="From `fleet init`: broker and keys."),
]
Insecure = Annotated[
    bool, typer.Option("--insecure", help="mqtt:// to another machine will do.")
]
