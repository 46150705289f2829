"""A YAML file as plain data, with the line that each key came from, and `--set path=value` overrides on top.

Stricter than YAML: keys are given once, and anchors, tags and deep nesting are refused. Raises ConfigError only. Knows
nothing about which keys there are.
"""

from typing import Any

import yaml

from core.errors import ConfigError

DEPTH_MAX = 16
_PLAIN_TAGS = frozenset({"tag:yaml.org,2002:map", "tag:yaml.org,2002:seq"})

Key = tuple[str, ...]


class ConfigSource:
    """A YAML file as plain data, and where each key came from."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.data: dict[str, Any] = {}
        self._places: dict[Key, tuple[str, int]] = {}

    def read(self, text: str) -> None:
        """Take in the file's text."""
        try:
            loader = yaml.SafeLoader(text)
            root = loader.get_single_node()
            if not isinstance(root, yaml.MappingNode):
                raise ConfigError(file=self.file, line=1, key="file", problem="must hold a mapping of keys to values")
            self.data = self._mapping(loader, root, (), set())
        except yaml.MarkedYAMLError as error:
            line = error.problem_mark.line + 1 if error.problem_mark else 1
            raise ConfigError(
                file=self.file, line=line, key="YAML", problem=error.problem or "cannot be parsed"
            ) from None
        except yaml.YAMLError as error:
            raise ConfigError(file=self.file, line=1, key="YAML", problem=" ".join(str(error).split())) from None

    def override(self, override: str, number: int) -> None:
        """Set one key from `path=value`; `number` stands for the line in errors."""
        path, separator, raw = override.partition("=")
        key = tuple(path.strip().split("."))
        if not separator or not all(key):
            problem = "an override must look like path=value, for example prefill.workers=2"
            raise ConfigError(file="--set", line=number, key=override, problem=problem)
        try:
            value = yaml.safe_load(raw)
        except (yaml.YAMLError, ValueError):
            raise ConfigError(file="--set", line=number, key=path, problem=f"{raw!r} is not a YAML scalar") from None
        if isinstance(value, dict | list):
            raise ConfigError(
                file="--set", line=number, key=path, problem="a value must be a scalar, not a mapping or a list"
            )
        section = self.data
        for part in key[:-1]:
            section = section.setdefault(part, {})
            if not isinstance(section, dict):
                raise ConfigError(file="--set", line=number, key=path, problem=f"'{part}' is not a section")
        section[key[-1]] = value
        self._places[key] = ("--set", number)

    def error(self, key: Key, problem: str, hint: str = "") -> ConfigError:
        """An error at `key`, or at the innermost enclosing section that is written down."""
        places = (self._places[key[:length]] for length in range(len(key), 0, -1) if key[:length] in self._places)
        file, line = next(places, (self.file, 1))
        return ConfigError(
            file=file, line=line, key=".".join(key), problem=f"{problem}." if hint else problem, hint=hint
        )

    def _mapping(self, loader: yaml.SafeLoader, node: yaml.MappingNode, key: Key, seen: set[int]) -> dict[str, Any]:
        mapping: dict[str, Any] = {}
        for name_node, value_node in node.value:
            name = name_node.value if isinstance(name_node, yaml.ScalarNode) else "?"
            here, line = (*key, name), name_node.start_mark.line + 1
            if name in mapping:
                first = self._places[here][1]
                raise ConfigError(
                    file=self.file, line=line, key=".".join(here), problem=f"given twice, first in line {first}"
                )
            self._places[here] = (self.file, line)
            mapping[name] = self._value(loader, value_node, here, seen)
        return mapping

    def _value(self, loader: yaml.SafeLoader, node: yaml.Node, key: Key, seen: set[int]) -> Any:
        if id(node) in seen:
            raise self.error(key, "anchors and aliases are not supported", "Write the value out.")
        seen.add(id(node))
        if len(key) > DEPTH_MAX:
            raise self.error(key, f"is nested deeper than {DEPTH_MAX} levels")
        if not isinstance(node, yaml.ScalarNode) and node.tag not in _PLAIN_TAGS:
            raise self.error(key, f"the tag {node.tag} is not supported")
        if isinstance(node, yaml.MappingNode):
            return self._mapping(loader, node, key, seen)
        if isinstance(node, yaml.SequenceNode):
            return [self._value(loader, item, (*key, str(index)), seen) for index, item in enumerate(node.value)]
        try:
            return loader.construct_object(node)
        except ValueError as error:
            raise self.error(key, f"{node.value!r} is not a valid value: {error}") from None


def dump_yaml(data: dict[str, Any]) -> str:
    """Plain data as YAML text, in its own order."""
    text: str = yaml.safe_dump(data, sort_keys=False)
    return text
