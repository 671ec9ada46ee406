"""The command line: parse, compose the floors below, render. The only room that prints.

Each module registers the commands of one group. Heavy imports happen inside the commands, so
that ``browndwarf --help`` answers at once, and inside ``main``, so that Ctrl-C finds it ready.
"""

from __future__ import annotations

import errno
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

from browndwarf.errors import BrowndwarfError, EnvironmentFault, Interrupted, UsageError

if TYPE_CHECKING:
    import typer


def build_app() -> typer.Typer:
    """The whole command line as a typer application."""
    import typer

    from browndwarf.cli import (
        bench,
        chat,
        doctor,
        engine,
        evaluate,
        imatrix,
        inspect,
        plan,
        quantize,
        report,
        serve,
        sweep,
    )

    app = typer.Typer(
        name="browndwarf",
        help="Find, prove and run the fastest MTP speculative decoding your machine can hold, "
        "on unmodified llama.cpp.",
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
        pretty_exceptions_enable=False,
    )

    @app.callback(invoke_without_command=True)
    def root(
        version: bool = typer.Option(False, "--version", help="Print the version and stop."),
        debug: bool = typer.Option(
            False, "--debug", help="Show a traceback with an error (anywhere on the line)."
        ),
    ) -> None:
        if version:
            from browndwarf import __version__

            sys.stdout.write(f"browndwarf {__version__}\n")
            raise typer.Exit

    commands = (doctor, inspect, plan, imatrix, quantize, sweep, report, bench, evaluate, chat)
    for module in (*commands, serve, engine):
        module.register(app)
    return app


def main(argv: list[str] | None = None) -> None:
    """Entry point of ``browndwarf``. Ends the process with the documented exit codes."""
    try:
        code = run(sys.argv[1:] if argv is None else argv)
    except KeyboardInterrupt:
        # A second Ctrl-C, while the first was answered.
        code = Interrupted.exit_code
    sys.exit(code)


def mtpquant() -> None:
    """Entry point of ``bd-mtpquant``: the same as ``browndwarf sweep``."""
    main(["sweep", *sys.argv[1:]])


def run(argv: list[str]) -> int:
    """Run one command line and return its exit code; errors are shown, not raised.

    0 fine, 1 the run found a problem, 2 usage, 3 environment, 130 interrupted.
    """
    from browndwarf.cli import streams

    streams.prepare()
    try:
        try:
            return _invoke([word for word in argv if word != "--debug"])
        finally:
            streams.finish()
    except (streams.ReaderGone, BrokenPipeError):
        streams.drop()
        return 0
    except (Exception, KeyboardInterrupt) as exc:
        return _show(exc, debug="--debug" in argv, json="--json" in argv)


def _show(exc: BaseException, *, debug: bool, json: bool) -> int:
    """Say what ended the command, as far as anybody listens; the exit code."""
    from browndwarf.cli import streams
    from browndwarf.cli.render import show_error

    error = _as_error(exc)
    try:
        if debug:
            traceback.print_exception(exc)
        show_error(error, json=json)
    except (streams.ReaderGone, BrowndwarfError):
        streams.drop()
    return error.exit_code


def _as_error(exc: BaseException) -> BrowndwarfError:
    from browndwarf.files import storage_error

    if isinstance(exc, BrowndwarfError):
        return exc
    if isinstance(exc, KeyboardInterrupt):
        return Interrupted("interrupted")
    if isinstance(exc, OSError) and exc.strerror:
        if isinstance(exc.filename, str) or exc.errno in (errno.ENOSPC, errno.EDQUOT):
            return storage_error(exc, Path(str(exc.filename or "output")), "use a file or folder")
        return EnvironmentFault(
            f"the operating system refused: {exc.strerror}",
            fix="run the same command with --debug to see what was asked of it",
        )
    return BrowndwarfError(
        f"an unexpected fault: {type(exc).__name__}: {exc}",
        why="this is a fault of browndwarf, not of your input",
        fix="run the same command with --debug and report what it prints",
    )


def _invoke(argv: list[str]) -> int:
    import typer

    # typer's base class of usage errors has no public name; it moved between releases.
    wrong: type[Any] = next(
        base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException"
    )
    command = typer.main.get_command(build_app())
    try:
        with command.make_context("browndwarf", list(argv)) as context:
            command.invoke(context)
    except typer.Exit as done:
        return done.exit_code
    except wrong as exc:
        if type(exc).__name__ == "NoArgsIsHelpError":
            exc.show()
            return UsageError.exit_code
        where = getattr(exc, "ctx", None)
        command_path = where.command_path if where is not None else "browndwarf"
        raise UsageError(
            exc.format_message().rstrip("."),
            why="the command line is not understood",
            fix=f"{command_path} --help",
        ) from exc
    return 0
