"""What do several commands take? The same options, under the same names."""

from __future__ import annotations

from typing import Annotated

import typer

Path = Annotated[
    str,
    typer.Argument(metavar="PATH", help="A checkpoint: a folder, or what another format keeps as one.", show_default=False),
]
Src = Annotated[str, typer.Argument(metavar="SRC", help="A checkpoint of any format that can be opened.", show_default=False)]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON on stdout, and nothing else there.")]

Select = Annotated[
    list[str] | None,
    typer.Option("--select", metavar="NAME", help="What to take: a name, what is below it, or a pattern.", show_default=False),
]
Exclude = Annotated[
    list[str] | None,
    typer.Option("--exclude", metavar="NAME", help="What not to take, likewise.", show_default=False),
]
Rename = Annotated[
    list[str] | None,
    typer.Option("--rename", metavar="OLD=NEW", help="Another name, also for what is below it.", show_default=False),
]
Cast = Annotated[
    list[str] | None,
    typer.Option("--cast", metavar="NAME=DTYPE", help="Convert floating-point tensors: 'model.*=bfloat16'.", show_default=False),
]
