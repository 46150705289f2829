"""The command line: `pdcluster up | down | status | validate | chat | bench | simulate | model | version`.

Commands parse, call and print; what they do lies in `cluster.cli_prepare`, `cluster.cli_up` and `cluster.chat`. Heavy
modules are imported inside the commands that need them, so that `--help` and `validate` load neither torch nor Ray.
Exit codes: 0 done, 1 something failed, 2 something given is wrong (a flag, a YAML key, a model), 130 interrupted.
"""

import json
import os
import sys
import time
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cluster.cli_bench import bench
from cluster.cli_simulate import simulate
from core.errors import ConfigError, ModelLoadError, PdclusterError

if TYPE_CHECKING:
    from cluster.chat import Answer, ChatOptions
    from cluster.cli_up import Launcher
    from cluster.state import StateStore

EXIT_FAILED = 1
EXIT_WRONG_INPUT = 2
EXIT_INTERRUPTED = 130
CONTEXT = {"help_option_names": ["-h", "--help"]}


class Commands(click.Group):
    """A group whose commands end with one clear line, never a traceback, when something known goes wrong."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except PdclusterError as error:
            lines = [str(error), *getattr(error, "__notes__", [])]
            click.echo("\n".join(f"error: {line}" for line in lines), err=True)
            ctx.exit(EXIT_WRONG_INPUT if isinstance(error, ConfigError | ModelLoadError) else EXIT_FAILED)
        except KeyboardInterrupt:
            ctx.exit(EXIT_INTERRUPTED)


class SystemTimer:
    """Real seconds."""

    def now(self) -> float:
        return time.monotonic()

    def wait(self, seconds: float) -> None:
        time.sleep(seconds)


def _launcher() -> "Launcher":
    """What starts clusters; tests put another one in its place."""
    from cluster.cli_launch import RayLauncher

    return RayLauncher()


def print_line(line: str) -> None:
    """Print a line. Who reads may be gone (a closed terminal or pipe); what is being started or ended goes on."""
    try:
        click.echo(line)
    except OSError:
        return


def _store() -> "StateStore":
    from cluster.state import StateStore

    return StateStore.default()


@click.group(cls=Commands, context_settings=CONTEXT)
@click.version_option(package_name="pdcluster", prog_name="pdcluster")
def main() -> None:
    """Serve language models from a Ray cluster in which some workers prefill prompts and others decode."""


main.add_command(bench)
main.add_command(simulate)


_FILE = click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
_SET = click.option("--set", "overrides", multiple=True, metavar="PATH=VALUE", help="Change a key, e.g. router.port=0.")


@main.command()
@_FILE
@_SET
@click.option("--detach", is_flag=True, help="Return once the cluster is ready; `pdcluster down` ends it.")
def up(file: Path, overrides: tuple[str, ...], detach: bool) -> None:
    """Start the cluster that FILE describes and serve until Ctrl-C."""
    from cluster.cli_prepare import prepare, require_free_port
    from cluster.cli_signals import interruptible
    from cluster.cli_up import require_absent, start_and_wait, take_down, watch
    from cluster.state import process_ref

    with interruptible():
        prepared = prepare(file, overrides)
        launcher, store, timer = _launcher(), _store(), SystemTimer()
        require_absent(store, prepared.config.name)
        require_free_port(prepared)
        print_line(prepared.describe())
        waiting = None if detach else process_ref(os.getpid(), "pdcluster up")
        record = start_and_wait(prepared, launcher, store, timer, print_line, up=waiting)
        if detach:
            return
        try:
            print_line("serving; Ctrl-C ends it")
            watch(record, launcher, store, timer, print_line)
        except KeyboardInterrupt:
            with store.lock(record.name):
                take_down(record, launcher, store, print_line)


@main.command()
@click.argument("name", required=False)
def down(name: str | None) -> None:
    """End the cluster NAME (or the only one): what `up` started, and nothing else."""
    from cluster.cli_up import take_down

    store = _store()
    record = store.find(name)
    with store.lock(record.name):
        take_down(record, _launcher(), store, print_line)


@main.command()
@click.argument("name", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--check", is_flag=True, help="Let every member check its invariants and show its books; 1 if any fails.")
def status(name: str | None, as_json: bool, check: bool) -> None:
    """Show the workers, requests and KV blocks of the cluster NAME (or of the only one)."""
    from cluster.audit import check_cluster, render_audit
    from cluster.state import is_stale
    from cluster.status import build_status, render_status
    from core.errors import ClusterError

    record = _store().find(name)
    if is_stale(record):
        problem = f"its processes are gone; `pdcluster down {record.name}` removes its record. Logs: {record.log_dir}"
        raise ClusterError(name=record.name, problem=problem)
    if check:
        launcher = _launcher()
        judged = check_cluster(lambda: launcher.audit(record), SystemTimer())
        click.echo(json.dumps(judged, indent=2) if as_json else render_audit(judged))
        sys.exit(EXIT_FAILED if judged["problems"] else 0)
    described = build_status(_launcher().status(record))
    click.echo(json.dumps(described, indent=2) if as_json else render_status(described))


@main.command()
@_FILE
@_SET
@click.option("--effective", is_flag=True, help="Print the whole configuration, defaults included, as YAML.")
def validate(file: Path, overrides: tuple[str, ...], effective: bool) -> None:
    """Check FILE and the model it names, and start nothing."""
    from cluster.cli_prepare import prepare
    from core.config import effective_config

    prepared = prepare(file, overrides)
    click.echo(effective_config(prepared.config) if effective else f"{prepared.describe()}\n{file} is valid")


@main.command()
@click.argument("words", nargs=-1, metavar="[NAME] [PROMPT...]")
@click.option("--url", help="Base URL of an API, instead of a cluster of this machine.")
@click.option("--system", help="A system message in front of the conversation.")
@click.option("--max-tokens", type=click.IntRange(min=1), help="Tokens of an answer at most.")
@click.option("--temperature", type=click.FloatRange(min=0), help="0 always takes the most likely token.")
@click.option("--seed", type=click.IntRange(min=0), help="Makes a sampled answer repeatable.")
@click.option("--timing", is_flag=True, help="Print where the time of each answer went.")
def chat(
    words: tuple[str, ...],
    url: str | None,
    system: str | None,
    max_tokens: int | None,
    temperature: float | None,
    seed: int | None,
    timing: bool,
) -> None:
    """Ask the cluster NAME (or the only one) PROMPT, or talk to it when there is no PROMPT; Ctrl-D ends the talk."""
    from cluster.chat import ChatOptions

    store = _store()
    if url is None:
        name = words[0] if words and words[0] in store.names() else None
        words = words[1:] if name else words
        record = store.find(name)
        url = record.urls[0] if record.urls else None
        if url is None:
            raise click.ClickException(f"cluster '{record.name}' is still starting")
    options = ChatOptions(max_tokens=max_tokens, temperature=temperature, seed=seed, has_timing=timing)
    messages = [{"role": "system", "content": system}] if system else []
    _converse(url, messages, " ".join(words), options)


def _converse(url: str, messages: list[dict[str, str]], prompt: str, options: "ChatOptions") -> None:
    """One question, or questions until the end of the input; the conversation grows in `messages`."""
    from cluster.chat import fetch_model_name, open_client, stream_answer

    is_interactive = not prompt
    with open_client(url) as client:
        model = fetch_model_name(client)
        if is_interactive:
            click.echo(f"{model} at {url}; Ctrl-D ends", err=True)
        while True:
            if is_interactive:
                prompt = _read_prompt()
                if prompt == "":
                    return
            messages.append({"role": "user", "content": prompt})
            answer = stream_answer(client, model, messages, options, lambda piece: click.echo(piece, nl=False))
            messages.append({"role": "assistant", "content": answer.text})
            _finish(answer, options)
            if not is_interactive:
                return


def _read_prompt() -> str:
    """The next line that says something; empty at the end of the input."""
    while True:
        click.echo("> ", nl=False, err=True)
        line = sys.stdin.readline()
        if line == "":
            click.echo(err=True)
            return ""
        if line.strip():
            return line.strip()


def _finish(answer: "Answer", options: "ChatOptions") -> None:
    from cluster.chat import render_timing

    click.echo()
    if answer.finish_reason == "length":
        click.echo("(cut at the limit of tokens)", err=True)
    if options.has_timing:
        click.echo(f"where the time went\n{render_timing(answer)}")


@main.group()
def model() -> None:
    """Import and list models."""


@model.command("import")
@click.argument("source", metavar="NAME|FILE.gguf")
def import_(source: str) -> None:
    """Turn a bundled model or a GGUF file into a Hugging Face directory in the user's cache, once."""
    from engine.model.catalog import import_model

    click.echo(import_model(source))


@model.command("list")
def list_() -> None:
    """List bundled names and imported models."""
    from engine.model.catalog import BUNDLED_PACKAGES, list_models

    for name, package in sorted(BUNDLED_PACKAGES.items()):
        click.echo(f"{name:<40}bundled, from the package {package}")
    for entry in list_models():
        click.echo(f"{entry.name:<40}{entry.size_bytes / 1e6:8.0f} MB  {entry.path}")


@main.command()
def version() -> None:
    """Print the version."""
    click.echo(f"pdcluster {installed_version('pdcluster')}")


if __name__ == "__main__":
    main()
