"""What a shell completes after the command's name; click does the options by itself."""

from __future__ import annotations

import click
from click.shell_completion import CompletionItem


def files(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Names of files, which the shell knows best."""
    return [CompletionItem(incomplete, type="file")]
