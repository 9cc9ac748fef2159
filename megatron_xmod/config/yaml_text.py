"""YAML with mistakes told by file and line, keys given once, and 1e-4 a number."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from megatron_xmod.errors import UserError


def parse_yaml(text: str, place: str) -> Any:
    """The value of a text. Raises UserError, naming `place` and the line."""
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = getattr(error, "problem", None) or " ".join(str(error).split())
        raise UserError(f"{place}{where}: {problem}.") from error


def read_yaml(file: str) -> dict[str, Any]:
    """The sections of a YAML file. Raises UserError where it can't be read or has none."""
    try:
        text = Path(file).read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"--config {file} can't be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise UserError(f"--config {file} is not a text file in UTF-8.") from error
    tree = parse_yaml(text, file)
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise UserError(f"{file} must have sections with settings, as 'model: {{hidden_size: 512}}'.")
    return tree


def dump_yaml(tree: dict[str, Any]) -> str:
    """Text that `parse_yaml` reads back."""
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False)


class _Loader(yaml.SafeLoader):
    """Refuses a key given twice, of which PyYAML would silently drop the first."""

    def construct_mapping(self, node, deep=False):
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise yaml.constructor.ConstructorError(problem=f"{key.value} is given twice",
                                                        problem_mark=key.start_mark)
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    pass


# PyYAML takes 1e-4 and 1.5e6 for texts: they lack a point, or a sign in the exponent.
for _class in (_Loader, _Dumper):
    _class.add_implicit_resolver("tag:yaml.org,2002:float",
                                 re.compile(r"^[-+]?([0-9][0-9_]*(\.[0-9_]*)?|\.[0-9]+)[eE][-+]?[0-9]+$"),
                                 list("-+.0123456789"))
