"""Every command and option of `headrace-admin` is documented, and nothing that it doesn't have."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from shared.admin.arguments import parser

PAGE = (Path(__file__).parents[2] / "docs" / "admin.md").read_text()


def commands(
    of: argparse.ArgumentParser, path: tuple[str, ...] = ()
) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Yield every command that can be given, with its parser."""
    subcommands = [a for a in of._actions if isinstance(a, argparse._SubParsersAction)]
    if not subcommands:
        yield " ".join(path), of
    for action in subcommands:
        for name, command in action.choices.items():
            yield from commands(command, (*path, name))


COMMANDS = dict(commands(parser()))


def section(command: str) -> str:
    """Return what the page says of a command, its heading included."""
    found = re.search(rf"^## `{command}\b.*?(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert found, f"docs/admin.md has no section for `{command}`"
    return found[0]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_is_documented_with_an_example(command: str) -> None:
    assert re.search(rf"^\$ headrace-admin (--json )?{command}\b", section(command), re.MULTILINE)


@pytest.mark.parametrize("command", COMMANDS)
def test_its_arguments_are_documented(command: str) -> None:
    told = section(command)
    for action in COMMANDS[command]._actions:
        if action.dest in ("help", "json"):
            continue
        for word in action.option_strings or [str(action.metavar)]:
            assert word in told, f"{command}: {word}"


def test_no_other_command_is_documented() -> None:
    headings = re.findall(r"^## `([a-z ]+)", PAGE, re.MULTILINE)
    assert [heading.strip() for heading in headings] == list(COMMANDS)


def test_exit_codes_are_documented() -> None:
    for code in ("0", "1", "2", "3"):
        assert re.search(rf"^\| {code} \|", PAGE, re.MULTILINE)
