"""Reads a YAML file as people mean it: what YAML would drop or bend in silence is an error with its line."""

from pathlib import Path
from typing import Any

import yaml
from yaml.constructor import ConstructorError


def read(path: Path) -> dict[str, Any]:
    """A deployment file's content, not yet checked.

    Raises:
        ValueError: the file is missing, is no YAML mapping, or says one thing twice; one line.
    """
    try:
        document = yaml.load(path.read_text(encoding="utf-8"), _StrictLoader)
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror}); see deployments/ for the shipped ones") from error
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise ValueError(f"{path}: not YAML ({line}{error.problem})") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not YAML ({' '.join(str(error).split())})") from error
    except ValueError as error:
        # YAML's own types: 2020-13-45 is a date to it, and no day.
        raise ValueError(f"{path}: not YAML ({error}); put such a value in quotes") from error
    except RecursionError as error:
        raise ValueError(f"{path}: nested too deeply to be read; a deployment has five levels at most") from error
    if not isinstance(document, dict):
        raise ValueError(f"{path}: must be a mapping with the keys job, train and optionally cluster")
    return document


class _StrictLoader(yaml.SafeLoader):
    """SafeLoader, which keeps the last of two equal keys and follows an anchor into itself, without either."""


def _mapping(loader: _StrictLoader, node: yaml.Node) -> dict[Any, Any]:
    if not isinstance(node, yaml.MappingNode):
        raise _refused("this is no mapping", node)
    seen: set[str] = set()
    for key_node, _ in node.value:
        if key_node.tag == "tag:yaml.org,2002:merge":
            continue  # <<, whose keys are there to be overridden
        key = loader.construct_object(key_node, deep=True)
        if not isinstance(key, str):
            raise _refused(f"the key {key} is no text to YAML; put it in quotes", key_node)
        if key in seen:
            raise _refused(f"{key} stands twice in one mapping; remove one of them", key_node)
        seen.add(key)
    return loader.construct_mapping(node, deep=True)


def _sequence(loader: _StrictLoader, node: yaml.Node) -> list[Any]:
    if not isinstance(node, yaml.SequenceNode):
        raise _refused("this is no list", node)
    return loader.construct_sequence(node, deep=True)


def _text(loader: _StrictLoader, node: yaml.Node) -> str:
    if not isinstance(node, yaml.ScalarNode):
        raise _refused("this is no text", node)
    value = str(loader.construct_scalar(node))
    if any("\ud800" <= character <= "\udfff" for character in value):
        raise _refused("half a surrogate pair is no text; write the character itself", node)
    return value


def _refused(problem: str, node: yaml.Node) -> yaml.YAMLError:
    return ConstructorError(None, None, problem, node.start_mark)


# Not PyYAML's generators, which build a mapping before its content and thereby allow it to contain itself.
for _tag, _constructor in (("map", _mapping), ("seq", _sequence), ("str", _text)):
    _StrictLoader.add_constructor(f"tag:yaml.org,2002:{_tag}", _constructor)
