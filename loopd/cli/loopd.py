"""`loopd`: the daemon, the model server, and what works on the files without the daemon (SPEC 9)."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from loopd import __version__
from loopd.cli.context import Context, LazyGroup, completion_command, run

if TYPE_CHECKING:
    from loopd.config import Config

_LAZY = {
    "audit": ("loopd.cli.session_commands", "Check the audit log."),
    "backup": ("loopd.cli.backup_commands", "Write every session to one file."),
    "model": ("loopd.cli.model_commands", "Fetch, serve and check a model."),
    "restore": ("loopd.cli.backup_commands", "Put the sessions of a backup into the home."),
    "session": ("loopd.cli.session_commands", "Verify, repair and fork sessions on disk."),
    "tools": ("loopd.cli.tools_commands", "Run the processes of tools; check executables."),
}


@click.group(cls=LazyGroup, lazy=_LAZY, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--home", metavar="DIR", help="Home directory (LOOPD_HOME).")
@click.option("--config", metavar="FILE", help="Configuration file (LOOPD_CONFIG).")
@click.version_option(__version__, prog_name="loopd", message="%(prog)s %(version)s")
@click.pass_context
def cli(ctx: click.Context, home: str | None, config: str | None) -> None:
    """An agent-loop appliance beside a local llama.cpp server."""
    ctx.obj = Context(home_flag=home, config_flag=config)


@cli.command()
@click.pass_obj
def serve(ctx: Context) -> None:
    """Run the daemon until SIGTERM."""
    from loopd.serve import serve_forever

    ctx.home.become_owner()
    sys.exit(serve_forever(ctx.home, load=lambda: _fresh(ctx)))


def _fresh(ctx: Context) -> "Config":
    """Read the configuration again, as SIGHUP asks."""
    ctx.__dict__.pop("config", None)
    return ctx.config


@cli.group()
def config() -> None:
    """Check or show the configuration."""


@config.command("check")
@click.argument("file", type=click.Path(path_type=Path))
@click.pass_obj
def config_check(ctx: Context, file: Path) -> None:
    """Refuse FILE, or say that it is good."""
    ctx.load(file, required=True)
    click.echo(f"{file}: ok")


@config.command("show")
@click.pass_obj
def config_show(ctx: Context) -> None:
    """Print the effective configuration as TOML, every key with its value."""
    import tomli_w

    click.echo(f"# {ctx.config_path}")
    for name, table in ctx.config.model_dump(mode="json").items():
        unset = "".join(
            f"# {key} is not set: the model server's own\n" for key, value in table.items() if value is None
        )
        values = {key: value for key, value in table.items() if value is not None}
        header, _, rest = tomli_w.dumps({name: values}).partition("\n")
        click.echo(f"\n{header}\n{unset}{rest}", nl=False)


cli.add_command(completion_command("loopd", cli))


def main() -> None:
    """Run the command line."""
    run(lambda **options: cli(prog_name="loopd", **options))


if __name__ == "__main__":
    main()
