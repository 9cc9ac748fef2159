"""Settings from YAML files and from the command line. jsonargparse converts the values and writes the help.

Files are laid over the defaults in the order given, then the command line over all of them, wherever it stands.
Each value remembers where it came from, so that an error can name the place.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import types
import typing
from collections.abc import Iterable, Iterator
from difflib import SequenceMatcher
from functools import cache
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentError, ArgumentParser

from megatron_xmod.config.deepspeed import deep_merge
from megatron_xmod.config.schema import Config
from megatron_xmod.config.yaml_text import dump_yaml, parse_yaml, read_yaml
from megatron_xmod.errors import CombinationError, UserError
from megatron_xmod.runtime.files import write_atomically

_COMMAND_LINE = "on the command line"
_FREE = "deepspeed"  # the one section whose keys are not ours
_LAUNCHER = ("local_rank", "local-rank")  # appended by launchers; the rank is read from the environment
_USAGE = "%(prog)s [--config FILE]... [--SECTION.SETTING VALUE]..."
_EPILOG = ("In a file, a setting's name is its path: 'model: {routing: {K: 8}}' is --model.routing.K 8. A list is "
           "given as words (--data.paths a b) or as '[a, b]'; null stands for nothing.")

_Settings = dict[str, tuple[Any, str]]  # full name -> value, where it came from


def load_config(argv: list[str], description: str | None = None) -> Config:
    """The configuration that the command line asks for.

    Args:
        argv: `--config FILE`, any number of times, and overrides as `--model.routing.K 8`. `--help` prints every
            setting and exits.
        description: What the program does, for the help.

    Raises:
        UserError: for anything wrong in the files or on the command line.
    """
    options = _options(argv)
    if any(name == "help" for name, _ in options):
        parser(description).print_help()
        raise SystemExit(0)
    files = [_one_word(name, words) for name, words in options if name == "config"]
    settings = _layered([(read_yaml(file), f"in {file}") for file in files])
    for name, words in options:
        if name != "config" and name not in _LAUNCHER:
            _put(settings, name, _from_words(name, words), _COMMAND_LINE)
    return _build(settings)


def config_from_dict(tree: dict[str, Any]) -> Config:
    """The inverse of `config_to_dict`. What is missing has its default. Raises UserError as `load_config` does."""
    return config_from_layers([(tree, "in the saved configuration")])


def config_from_layers(layers: Iterable[tuple[dict[str, Any], str]]) -> Config:
    """The configuration that settings laid over each other give, the later ones over the earlier.

    Args:
        layers: Settings, nested or by their full names, and where they come from ("in a.yaml") for messages.

    Raises:
        CombinationError: values that are good alone do not go together, or are out of range.
        UserError: an unknown name, or a value of the wrong type.
    """
    return _build(_layered(layers))


def _layered(layers: Iterable[tuple[dict[str, Any], str]]) -> _Settings:
    settings: _Settings = {}
    for tree, origin in layers:
        for key, value in _flatten(tree):
            _put(settings, key, value, origin)
    return settings


def config_to_dict(config: Config) -> dict[str, Any]:
    """The configuration as dictionaries, lists and plain values."""
    return _plain(dataclasses.asdict(config))


def save_config(config: Config, path: str | os.PathLike) -> None:
    """Writes a file that `--config` reads back as the same configuration; a failure leaves the old file whole."""
    write_atomically(Path(path), dump_yaml(config_to_dict(config)))


def parser(description: str | None = None) -> ArgumentParser:
    """The jsonargparse parser of all settings; its help is made from the schema's docstrings."""
    result = ArgumentParser(usage=_USAGE, description=description, epilog=_EPILOG, exit_on_error=False)
    result.add_argument("--config", metavar="FILE", default=argparse.SUPPRESS,
                        help="A YAML file with settings. May be given several times: later files win.")
    topics = [(field, cls) for field, cls in typing.get_type_hints(Config).items() if dataclasses.is_dataclass(cls)]
    for field, cls in topics:
        result.add_class_arguments(cls, field)
    result.add_class_arguments(Config, skip={field for field, _ in topics})
    for action in result._actions:
        # jsonargparse also offers to read a section from a file and to append to a list; one way is enough.
        action.option_strings = [option for option in action.option_strings if not option.endswith("+")]
        if action.dest in _SECTIONS:
            action.help = argparse.SUPPRESS
    return result


def _hints(cls: type, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Full name and type of every setting."""
    for name, hint in typing.get_type_hints(cls).items():
        if dataclasses.is_dataclass(hint):
            yield from _hints(hint, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", hint


_HINTS = dict(_hints(Config))
_SECTIONS = {key[:i] for key in _HINTS for i, letter in enumerate(key) if letter == "."}


def _options(argv: list[str]) -> list[tuple[str, list[str]]]:
    """Name and words of every option, in order."""
    options: list[tuple[str, list[str]]] = []
    for word in argv:
        if word == "-h":
            options.append(("help", []))
        elif word.startswith("--") and word != "--":
            name, equals, value = word[2:].partition("=")
            options.append((name, [value] if equals else []))
        elif options:
            options[-1][1].append(word)
        else:
            raise UserError(f"Unexpected argument {word!r}: settings are given as --section.setting VALUE, files as "
                            "--config FILE. --help lists all settings.")
    return options


def _one_word(name: str, words: list[str]) -> str:
    if len(words) != 1:
        raise UserError(f"--{name} takes one value, but got {' '.join(words) or 'none'}.")
    return words[0]


def _from_words(name: str, words: list[str]) -> Any:
    """The value of an option; jsonargparse converts words to the setting's type later."""
    if name.startswith(f"{_FREE}."):
        return parse_yaml(_one_word(name, words), f"--{name}")
    several = any(typing.get_origin(hint) in (list, tuple) for hint in _alternatives(_HINTS.get(name)))
    if several and words and words != ["null"] and not words[0].startswith("["):
        return words
    if name in _HINTS:
        return _one_word(name, words)
    return words  # an unknown name: refused where it is put


def _flatten(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Full name and value of every setting of nested sections; an empty section has none."""
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if value in (None, {}) and (name in _SECTIONS or name == _FREE):
            continue
        if isinstance(value, dict) and value and name != _FREE:
            yield from _flatten(value, f"{name}.")
        else:
            yield name, value


def _put(settings: _Settings, name: str, value: Any, origin: str) -> None:
    if name.startswith(f"{_FREE}."):
        value, name = _nest(name.split(".")[1:], value), _FREE
    if name not in _HINTS:
        raise UserError(_unknown(name, origin))
    if name == _FREE and isinstance(value, dict) and name in settings:
        value = deep_merge(settings[name][0], value)
    settings[name] = (value, origin)


def _unknown(name: str, origin: str) -> str:
    if name in _SECTIONS:
        return f"{name} ({origin}) is a section and has no value itself. {_inside(name)}"
    section, _, last = name.rpartition(".")
    scores = {}
    for key in _HINTS:
        last_alike = SequenceMatcher(None, last, key.rpartition(".")[2]).ratio()
        scores[key] = 2 * last_alike + SequenceMatcher(None, name, key).ratio()
    best = max(scores.values())
    near = " or ".join(key for key, score in scores.items() if score >= best - 0.1)
    hint = f"did you mean {near}?" if best >= 1.6 else f"{_inside(section)} --help lists all."
    return f"There is no setting {name} ({origin}); {hint}"


def _inside(section: str) -> str:
    """The next names below a section; the sections themselves where there is no such section."""
    prefix = f"{section}." if section in _SECTIONS else ""
    names = dict.fromkeys(key[len(prefix):].partition(".")[0] for key in _HINTS if key.startswith(prefix))
    return f"{section if prefix else 'the configuration'} has {', '.join(names)}."


@cache
def _reader() -> ArgumentParser:
    """Making a parser takes longer than parsing, and a sweep has hundreds of configurations."""
    return parser()


def _build(settings: _Settings) -> Config:
    tree: dict[str, Any] = {}
    for name, (value, _) in settings.items():
        tree = deep_merge(tree, _nest(name.split("."), value))
    if not all(_of_a_kind(name, value) for name, (value, _) in settings.items()):
        raise UserError(_first_wrong(settings))
    try:
        parsed = _reader().parse_object(tree)
    except ArgumentError as error:
        raise UserError(_first_wrong(settings)) from error
    try:
        return Config(**vars(_reader().instantiate(parsed)))
    except UserError as error:
        raise CombinationError(str(error)) from error


def _of_a_kind(name: str, value: Any) -> bool:
    """Whether null or a bool may stand there; jsonargparse lets them pass everywhere."""
    kinds = _alternatives(_HINTS[name])
    return type(None) in kinds if value is None else bool in kinds or not isinstance(value, bool)


def _first_wrong(settings: _Settings) -> str:
    """What is wrong with the first value that is not of its setting's type, and where it came from."""
    for name, (value, origin) in settings.items():
        fits = _of_a_kind(name, value)
        try:
            _reader().parse_object(_nest(name.split("."), value), defaults=False)
        except ArgumentError:
            fits = False
        if not fits:
            meaning = " or ".join(_meaning(kind) for kind in _alternatives(_HINTS[name]))
            return f"{name} is {_shown(value)} {origin}; it must be {meaning}."
    return "The settings are good one by one, but not together."  # the cause, chained, says more


def _nest(keys: list[str], value: Any) -> dict[str, Any]:
    for key in reversed(keys):
        value = {key: value}
    return value


def _alternatives(hint: Any) -> tuple[Any, ...]:
    """The members of a union; the type itself where it is none."""
    return typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)


def _meaning(kind: Any) -> str:
    """A type in words."""
    inside = typing.get_args(kind)
    if typing.get_origin(kind) is typing.Literal:
        return "one of " + ", ".join(map(str, inside))
    if typing.get_origin(kind) is tuple:
        return f"a list of {len(inside)} values, each {_meaning(inside[0])}"
    if typing.get_origin(kind) is list:
        return f"a list of values, each {_meaning(inside[0])}"
    if typing.get_origin(kind) is dict:
        return "a section"
    return {int: "a whole number", float: "a number", bool: "true or false", type(None): "null",
            str: "text (in a file, quote what looks like a number)"}[kind]


def _shown(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, (list, tuple)) else value
