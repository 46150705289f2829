"""The repository as data: its modules parsed, its text files read. What a rule looks at.

Parsing stands in for importing, so that the rules run anywhere and on trees that were made to break them. Knows no
rule.
"""

import ast
import functools
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
STDLIB = frozenset(sys.stdlib_module_names)

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True, kw_only=True)
class Import:
    """One imported name."""

    module: str
    """Absolute name of the module that the statement names."""
    name: str | None
    """`y` of `from module import y`; None for `import module`."""
    line: int
    is_lazy: bool
    """Inside a function or under TYPE_CHECKING: not executed when the module is imported."""


@dataclass(frozen=True, kw_only=True)
class Module:
    """One Python file."""

    name: str
    """Dotted name from the repository's root, for example `engine.kv.pool`; a package has the name of its folder."""
    path: Path
    """Relative to the root."""
    text: str

    @functools.cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @functools.cached_property
    def nodes(self) -> tuple[ast.AST, ...]:
        """Every node of the tree, walked once for all rules."""
        return tuple(ast.walk(self.tree))

    @functools.cached_property
    def is_package(self) -> bool:
        return self.path.name == "__init__.py"

    @functools.cached_property
    def imports(self) -> tuple[Import, ...]:
        return tuple(self._imports(self.tree, is_lazy=False))

    def _imports(self, node: ast.AST, *, is_lazy: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(module=alias.name, name=None, line=node.lineno, is_lazy=is_lazy)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield Import(module=self._absolute(node), name=alias.name, line=node.lineno, is_lazy=is_lazy)
        lazy = is_lazy or isinstance(node, FunctionNode) or (isinstance(node, ast.If) and is_type_checking(node))
        for child in ast.iter_child_nodes(node):
            yield from self._imports(child, is_lazy=lazy)

    def _absolute(self, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        parts = self.name.split(".")
        base = parts[: len(parts) - node.level + self.is_package]
        return ".".join([*base, node.module] if node.module else base)


@dataclass(frozen=True, kw_only=True)
class Source:
    """A repository."""

    root: Path

    @functools.cached_property
    def project(self) -> dict[str, object]:
        """pyproject.toml, parsed."""
        return tomllib.loads(self.read("pyproject.toml"))

    @functools.cached_property
    def packages(self) -> tuple[str, ...]:
        """The packages that pyproject.toml lists."""
        names = table(self.project, "tool", "setuptools")["packages"]
        assert isinstance(names, list)
        return tuple(names)

    @functools.cached_property
    def roots(self) -> tuple[str, ...]:
        """The top-level packages."""
        return tuple(sorted({name.partition(".")[0] for name in self.packages}))

    @functools.cached_property
    def modules(self) -> tuple[Module, ...]:
        """Every module of every top-level package."""
        return tuple(self._modules(*self.roots))

    @functools.cached_property
    def tests(self) -> tuple[Module, ...]:
        """Every Python file under tests/."""
        return tuple(self._modules("tests"))

    @functools.cached_property
    def scripts(self) -> dict[str, str]:
        """Text of every file in scripts/ and .ci/, by path."""
        return {str(path.relative_to(self.root)): text for path, text in self._texts("scripts/*", ".ci/*")}

    @functools.cached_property
    def documents(self) -> dict[str, str]:
        """Text of README.md and docs/*.md, by path."""
        return {str(path.relative_to(self.root)): text for path, text in self._texts("README.md", "docs/*.md")}

    def read(self, path: str) -> str:
        """A text file; empty when there is none."""
        return (self.root / path).read_text(encoding="utf-8") if (self.root / path).is_file() else ""

    def _texts(self, *patterns: str) -> Iterator[tuple[Path, str]]:
        for pattern in patterns:
            for path in sorted(self.root.glob(pattern)):
                if path.is_file():
                    yield path, path.read_text(encoding="utf-8")

    def _modules(self, *folders: str) -> Iterator[Module]:
        for folder in folders:
            for path, text in self._texts(f"{folder}/**/*.py"):
                relative = path.relative_to(self.root)
                parts = relative.with_suffix("").parts
                name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
                yield Module(name=name, path=relative, text=text)


def table(document: dict[str, object], *keys: str) -> dict[str, object]:
    """A table inside a TOML document."""
    for key in keys:
        inner = document[key]
        assert isinstance(inner, dict), f"{key} is no table"
        document = inner
    return document


def is_type_checking(node: ast.If) -> bool:
    """Is this `if TYPE_CHECKING:`?"""
    return any(
        (isinstance(part, ast.Name) and part.id == "TYPE_CHECKING")
        or (isinstance(part, ast.Attribute) and part.attr == "TYPE_CHECKING")
        for part in ast.walk(node.test)
    )


def dotted(node: ast.AST) -> str:
    """`a.b.c` of a name or attribute expression, empty for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        base = dotted(node.value)
        return f"{base}.{node.attr}" if base else ""
    return ""


def top_level_names(module: Module) -> Iterator[tuple[str, int]]:
    """(name, line) of every class, function and assigned name at the top level of a module."""
    for node in module.tree.body:
        if isinstance(node, ast.ClassDef | FunctionNode):
            yield node.name, node.lineno
        elif isinstance(node, ast.Assign):
            yield from ((target.id, node.lineno) for target in node.targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id, node.lineno


@functools.cache
def repository() -> Source:
    """This repository. Parsed once per session."""
    return Source(root=REPOSITORY)
