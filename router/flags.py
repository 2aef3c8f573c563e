"""From the table of settings to a command's flags, and the page that --help prints.

Values come out as they were typed: `settings.py` turns them into what a config holds, the same way for flags, variables
and files. Pages are plain text in two columns, for Rich's tables cut long flags off at 80 columns.
"""

import inspect
import shutil
import textwrap
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import typer
import typer.core

from paceline.router import settings
from paceline.router.settings import Setting

NAMES_WIDTH = 34  # of the column of flags: the longest of them fits
OTHER = "Other"


def takes_settings(command: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """The decorated function is called with the flags that were given, by name, and the path of --config."""

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        @wraps(function)
        def run(config: Path | None, **flags: Any) -> None:
            function({name: value for name, value in flags.items() if value is not None}, config)

        parameters = [_parameter(setting) for setting in settings.of(command)]
        file = typer.Option("--config", help="YAML file with settings.", metavar="FILE", rich_help_panel=OTHER)
        parameters.append(_keyword("config", Annotated[Path | None, file]))
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return run

    return decorate


def _parameter(setting: Setting) -> inspect.Parameter:
    kind: Any = list[str] if setting.type == tuple[str, ...] else str
    metavar: str | None = metavar_of(setting)
    name = setting.flag
    if setting.type is bool:
        kind, metavar, name = bool, None, f"{setting.flag}/--no-{setting.flag[2:]}"
    option = typer.Option(
        name, *setting.also, help=_help_of(setting), metavar=metavar, rich_help_panel=setting.panel, show_default=False
    )
    return _keyword(setting.name, Annotated[kind | None, option])


def _keyword(name: str, annotation: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def metavar_of(setting: Setting) -> str:
    if setting.name.endswith(("file", "certs", "template", "json", "plot")):
        return "FILE"
    if setting.name.endswith("dir"):
        return "DIR"
    if setting.choices or setting.name.endswith("name"):
        return "NAME"
    kind = getattr(setting.type, "__origin__", setting.type)  # under its bounds
    return {int: "N", float: "X"}.get(kind, "TEXT")


def _help_of(setting: Setting) -> str:
    parts = [setting.help]
    if setting.choices:
        parts.append(f"One of {', '.join(setting.choices)}.")
    if default := _default_of(setting):
        parts.append(f"[{default}]")
    if longer := [name for name in setting.also if name.startswith("--")]:
        parts.append(f"Also {', '.join(longer)}.")
    return " ".join(parts)


def _default_of(setting: Setting) -> str:
    if setting.shown or setting.default in (None, ()) or setting.default is False:
        return setting.shown or ""
    if setting.default is True:
        return "on"
    return f"{setting.default:g}" if isinstance(setting.default, float) else str(setting.default)


class Command(typer.core.TyperCommand):
    """A command whose help groups flags by panel and cuts nothing off."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        width = max(60, min(shutil.get_terminal_size().columns, 100))
        usage = " ".join([ctx.command_path, *self.collect_usage_pieces(ctx)])
        blocks = [f"Usage: {usage}", "\n\n".join(_wrapped(text, width) for text in (self.help or "").split("\n\n"))]
        panels: dict[str, list[str]] = {}
        for param in self.get_params(ctx):
            if param.param_type_name == "argument":
                rows = panels.setdefault("Arguments", [])
                rows.append(_entry(param.name, getattr(param, "help", "") or "", width))
            elif not getattr(param, "hidden", False):
                rows = panels.setdefault(getattr(param, "rich_help_panel", None) or OTHER, [])
                rows.append(_entry(_name_of(param), getattr(param, "help", "") or "", width))
        panels[OTHER] = panels.pop(OTHER)  # last
        blocks += [typer.style(panel, bold=True) + "\n" + "\n".join(rows) for panel, rows in panels.items()]
        formatter.write("\n\n".join(blocks) + "\n")


def _wrapped(text: str, width: int) -> str:
    return textwrap.fill(" ".join(text.split()), width, break_on_hyphens=False)


def _name_of(param: Any) -> str:
    """`-m, --model NAME`, `--[no-]enable-prefix-caching`; other long names stand in the help."""
    short = next((name for name in param.opts if not name.startswith("--")), "")
    long = next(name for name in param.opts if name.startswith("--"))
    if param.secondary_opts:
        return f"--[no-]{long[2:]}"
    metavar = f" {param.metavar}" if param.metavar else ""
    return (f"{short}, " if short else "") + long + metavar


def _entry(name: str, help: str, width: int) -> str:
    lines = textwrap.wrap(help, width - NAMES_WIDTH - 2, break_on_hyphens=False) or [""]
    first = f"  {name:<{NAMES_WIDTH - 1}} {lines[0]}"
    if len(name) >= NAMES_WIDTH:
        first = f"  {name}\n{'':{NAMES_WIDTH + 2}}{lines[0]}"
    return "\n".join([first.rstrip(), *(f"{'':{NAMES_WIDTH + 2}}{line}" for line in lines[1:])])
