"""The command line: parse, compose the floors below, render. The only room that prints.

Each module registers the commands of one group. Heavy imports happen inside the commands, so
that ``browndwarf --help`` answers at once.
"""

from __future__ import annotations

import sys

import typer

from browndwarf.errors import BrowndwarfError, Interrupted


def build_app() -> typer.Typer:
    """The whole command line as a typer application."""
    from browndwarf.cli import bench, chat, doctor, engine, evaluate, inspect, plan, sweep

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

    for module in (doctor, inspect, plan, sweep, bench, evaluate, chat, engine):
        module.register(app)
    return app


def main(argv: list[str] | None = None) -> None:
    """Entry point of ``browndwarf``. Ends the process with the documented exit codes."""
    sys.exit(run(sys.argv[1:] if argv is None else argv))


def mtpquant() -> None:
    """Entry point of ``bd-mtpquant``: the same as ``browndwarf sweep``."""
    main(["sweep", *sys.argv[1:]])


def run(argv: list[str]) -> int:
    """Run one command line and return its exit code; errors are shown, not raised.

    0 fine, 1 the run found a problem, 2 usage, 3 environment, 130 interrupted.
    """
    from browndwarf.cli.render import show_error

    debug = "--debug" in argv
    json = "--json" in argv
    argv = [word for word in argv if word != "--debug"]
    try:
        return _invoke(argv)
    except BrowndwarfError as error:
        if debug:
            raise
        show_error(error, json=json)
        return error.exit_code
    except KeyboardInterrupt:
        if debug:
            raise
        show_error(Interrupted("interrupted"), json=json)
        return Interrupted.exit_code
    except BrokenPipeError:
        # The reader of our output went away (`| head`): nothing left to say to anybody.
        sys.stderr.close()
        return 0
    except Exception as exc:
        if debug:
            raise
        fault = BrowndwarfError(
            f"an unexpected fault: {type(exc).__name__}: {exc}",
            why="this is a fault of browndwarf, not of your input",
            fix="run the same command with --debug and report what it prints",
        )
        show_error(fault, json=json)
        return fault.exit_code


def _invoke(argv: list[str]) -> int:
    command = typer.main.get_command(build_app())
    try:
        command(argv, prog_name="browndwarf")
    except SystemExit as exc:
        # typer ends every command so: with a code, or with a usage error it has shown itself.
        return exc.code if isinstance(exc.code, int) else 0
    return 0
