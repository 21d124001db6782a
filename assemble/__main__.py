"""`python -m assemble`: checks, mends, sizes, serves and publishes checkpoints, without a GPU and without loading a model."""

import typer

from assemble.commands.loading import LoadingGroup

app = typer.Typer(cls=LoadingGroup, add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__)


@app.callback()
def _group() -> None:
    """Typer makes a group only of what has commands or a callback."""


if __name__ == "__main__":
    app(prog_name="python -m assemble")
