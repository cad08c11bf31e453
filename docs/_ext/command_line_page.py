"""The page of the command line, written from the commands themselves when the site is built."""

import re

from typer.main import get_command

from paceline.cli.program import app as commands

PAGE = "reference/command-line"


def command_line():
    """Return the sections of all commands as Markdown."""
    program = get_command(commands)
    return "\n".join(_sections(program, program.make_context("paceline", [], resilient_parsing=True)))


def _sections(command, context):
    """Yield the lines of a command and of its subcommands; a group without options of its own has no section."""
    path = context.command_path
    title = "Options of every command" if context.parent is None else f"`{path}`"
    records = [
        record
        for parameter in command.get_params(context)
        if parameter.name != "help"
        for record in [parameter.get_help_record(context)]
        if record
    ]
    inner = getattr(command, "commands", {})
    if records or not inner:
        yield from (f"## {title}", "", plain(command.help or ""), "")
        yield from ("```text", " ".join([path, *command.collect_usage_pieces(context)]), "```", "")
        for names, meaning in records:
            yield from (f"`{names}`", f": {plain(meaning)}", "")
    for name, each in inner.items():
        yield from _sections(each, each.make_context(name, [], parent=context, resilient_parsing=True))


def plain(text):
    """Return the text of a help on one line, without a meaning in Markdown."""
    return re.sub(r"([\\`*_<>\[\]{}$|#])", r"\\\1", " ".join(text.split()))


def add_sections(app, page, source):
    """Append the sections to the page."""
    if page == PAGE:
        source[0] += "\n" + command_line()


def setup(app):
    """Register the page."""
    app.connect("source-read", add_sections)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
