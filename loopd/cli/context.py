"""What every command shares: the home and configuration that were asked for, and how an error is shown."""

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from loopd.errors import LoopdError

if TYPE_CHECKING:
    from loopd.config import Config
    from loopd.home import Home

_INTERRUPTED = 130


@dataclass
class Context:
    """The object that click hands to every command. Flags go before the environment, the file and the defaults.

    `config_fault` says why the file was refused where a command goes on without it.
    """

    home_flag: str | None = None
    config_flag: str | None = None
    config_fault: str = ""

    @cached_property
    def home(self) -> "Home":
        """The home directory; nothing is created."""
        from loopd.home import Home, default_home

        return Home(Path(self.home_flag).absolute() if self.home_flag else default_home())

    @property
    def config_path(self) -> Path:
        """The configuration file that would be read."""
        from loopd.home import default_config

        return Path(self.config_flag) if self.config_flag else default_config()

    @cached_property
    def config(self) -> "Config":
        """The effective configuration.

        Raises:
            ConfigError: it is refused, or a file named by flag or environment is not there.
        """
        required = self.config_flag is not None or "LOOPD_CONFIG" in os.environ
        return self.load(self.config_path, required=required)

    def load(self, path: Path, *, required: bool) -> "Config":
        """Read a configuration for this home.

        Raises:
            ConfigError: it is refused, also for what only the home tells.
        """
        from loopd.config import load_config
        from loopd.tools.files.roots import check_roots

        config = load_config(path, required=required)
        check_roots(config, self.home, path)
        return config


class LazyGroup(click.Group):
    """A group whose commands are imported when they are used: `--help` must not pay for what it only names."""

    def __init__(self, *args: Any, lazy: dict[str, tuple[str, str]] | None = None, **kwargs: Any) -> None:  # noqa: ANN401
        super().__init__(*args, **kwargs)
        self._lazy = lazy or {}

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Name the commands, the lazy ones without importing them."""
        return sorted([*super().list_commands(ctx), *self._lazy])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the command if it is a lazy one."""
        if cmd_name not in self._lazy:
            return super().get_command(ctx, cmd_name)
        module, _ = self._lazy[cmd_name]
        command: click.Command = getattr(import_module(module), cmd_name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002 - click's signature
        """Write the list of commands, with the short help given beside the lazy ones."""
        rows = [(name, text) for name, (_, text) in self._lazy.items()]
        rows += [(name, command.get_short_help_str(80)) for name, command in self.commands.items()]
        with formatter.section("Commands"):
            formatter.write_dl(sorted(rows))


def completion_command(program: str, group: click.Group) -> click.Command:
    """Return the command that prints the shell completion script of a program."""
    words = f'Print a shell completion script, e.g. for ~/.bashrc: eval "$({program} completion bash)".'

    @click.command("completion", help=words, short_help="Print a shell completion script.")
    @click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
    def completion(shell: str) -> None:
        from click.shell_completion import get_completion_class

        found = get_completion_class(shell)
        assert found is not None
        click.echo(found(group, {}, program, f"_{program.upper()}_COMPLETE").source())

    return completion


def fail(error: LoopdError) -> NoReturn:
    """Show the error as `error: …` and `hint: …` on stderr and end with its exit status (SPEC 9)."""
    click.echo(f"error: {error.message}", err=True)
    if error.hint:
        click.echo(f"hint: {error.hint}", err=True)
    sys.exit(error.exit_code)


def run(command: Callable[..., object]) -> NoReturn:
    """Run a command line to its exit status: no traceback for anything that a user can cause."""
    try:
        command(standalone_mode=False)
    except LoopdError as error:
        fail(error)
    except click.exceptions.Exit as done:
        sys.exit(done.exit_code)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        sys.exit(2)
    except click.ClickException as error:
        context = getattr(error, "ctx", None)
        click.echo(f"error: {error.format_message()}", err=True)
        if context is not None:
            click.echo(f"hint: {context.command_path} --help", err=True)
        sys.exit(2)
    except (click.Abort, KeyboardInterrupt):
        sys.exit(_INTERRUPTED)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        click.echo(f"error: {error.strerror or error}{where}", err=True)
        sys.exit(1)
    sys.exit(0)
