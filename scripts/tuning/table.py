"""The `measured` module of a kernel: tables of Python literals in a source file, read and rewritten."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Table = Mapping[Any, tuple[Any, ...]]


def read_tables(path: Path) -> dict[str, dict[Any, tuple[Any, ...]]]:
    """Every table of the file, by name."""
    return {name: ast.literal_eval(node) for name, (_, node) in _assignments(path.read_text()).items()}


def merge_into(path: Path, name: str, entries: Table) -> None:
    """Adds entries to a table of the file, in place of those with the same keys; the rest of the file stays as it is.

    Raises:
        ValueError: there is no such table.
    """
    source = path.read_text()
    assignments = _assignments(source)
    if name not in assignments:
        raise ValueError(f"{path} has no table {name!r}; it has {', '.join(assignments)}")
    statement, node = assignments[name]
    merged = ast.literal_eval(node) | dict(entries)
    annotation = ast.unparse(statement.annotation)
    lines = source.splitlines(keepends=True)
    assert statement.end_lineno is not None
    lines[statement.lineno - 1 : statement.end_lineno] = [f"{name}: {annotation} = {_rendered(merged)}\n"]
    path.write_text("".join(lines))


def _assignments(source: str) -> dict[str, tuple[ast.AnnAssign, ast.expr]]:
    """Statements ``NAME: type = MappingProxyType({...})`` and the dictionary inside."""
    found = {}
    for statement in ast.parse(source).body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.value, ast.Call):
            assert isinstance(statement.target, ast.Name)
            found[statement.target.id] = (statement, statement.value.args[0])
    return found


def _rendered(table: Table) -> str:
    """As the project's formatter writes it."""
    if not table:
        return "MappingProxyType({})"
    entries = "".join(f"        {_literal(key)}: {_literal(value)},\n" for key, value in sorted(table.items()))
    return f"MappingProxyType(\n    {{\n{entries}    }}\n)"


def _literal(value: Any) -> str:
    if isinstance(value, tuple):
        return "(" + ", ".join(map(_literal, value)) + ")"
    return f'"{value}"' if isinstance(value, str) else repr(value)
