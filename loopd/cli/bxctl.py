"""`bxctl`: what people and scripts use to talk to the daemon (SPEC 9)."""

import io
import sys

import click

from loopd import __version__
from loopd.cli.context import Context, LazyGroup, completion_command, run

_LAZY = {
    "approve": ("loopd.cli.approve", "Show or answer what a session asks."),
    "cancel": ("loopd.cli.change", "Cancel the turn in flight."),
    "chat": ("loopd.cli.chat", "Talk, or say the given messages."),
    "compact": ("loopd.cli.change", "Close the epoch and go on from a summary."),
    "delete": ("loopd.cli.change", "Remove a session for good."),
    "doctor": ("loopd.cli.look", "Print one page for a bug report."),
    "export": ("loopd.cli.export", "Print a session as Markdown or as OpenAI messages."),
    "fork": ("loopd.cli.change", "Make a new session from another's first lines."),
    "sessions": ("loopd.cli.look", "List the sessions."),
    "show": ("loopd.cli.look", "Print a session's records."),
    "status": ("loopd.cli.look", "Describe the daemon."),
    "tools": ("loopd.cli.look", "List the tools."),
    "usage": ("loopd.cli.look", "Print the tokens of each request."),
    "why": ("loopd.cli.look", "Explain the losses of a session."),
}


@click.group(cls=LazyGroup, lazy=_LAZY, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--home", metavar="DIR", help="Home directory (LOOPD_HOME).")
@click.option("--config", metavar="FILE", help="Configuration file (LOOPD_CONFIG).")
@click.version_option(__version__, prog_name="bxctl", message="%(prog)s %(version)s")
@click.pass_context
def cli(ctx: click.Context, home: str | None, config: str | None) -> None:
    """Talk to loopd. LOOPD_SOCKET names another daemon's socket.

    Exit status: 0 ok, 1 it failed, 2 wrong usage or configuration, 3 no daemon, 4 a log was refused.
    """
    ctx.obj = Context(home_flag=home, config_flag=config)


cli.add_command(completion_command("bxctl", cli))


def main() -> None:
    """Run the command line."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # there is none where the caller has closed it
            stream.reconfigure(errors="backslashreplace")
    run(lambda **options: cli(prog_name="bxctl", **options))


if __name__ == "__main__":
    main()
