"""Rules about scripts and documents: the paths they name exist, their numbers agree with the code, nothing is skipped.

Each takes a `Source` and returns what breaks it. Knows nothing about imports or sizes.
"""

import ast
import re
from collections.abc import Iterator

from tests.architecture.source import Source, dotted

INVARIANT = re.compile(r"\b(?:KV|TX|EV|RQ|SP|GR|EP|CL)-\d+\b")
PATH = re.compile(r"(?<![\w./~$}-])(?:scripts|configs|tests|docs|\.ci)/[\w./-]*\w")
HIDING_OPTIONS = re.compile(r"--deselect|--ignore|(?:pytest|scripts/test)\b.*\s-[km]\b|pytest.*\|\| *(?:true|:)")
HIDING_NAMES = re.compile(
    r"(?:^|\.)(?:importorskip|collect_ignore(?:_glob)?|SkipTest|skipTest|skipif|skipIf|skipUnless)$"
    r"|^(?:pytest|pytest\.mark|mark|unittest)\.(?:skip|xfail)$"
)


PLUGIN_FOLDER = "tests/plugins/"
"""The only place that may name what hides a test: it polices it, and its tests plant it."""


def script_hides_no_test(source: Source) -> Iterator[str]:
    for path, text in (source.scripts | {"pyproject.toml": source.read("pyproject.toml")}).items():
        for number, line in enumerate(text.splitlines(), start=1):
            if HIDING_OPTIONS.search(line.partition("# ")[0]) or (path == "pyproject.toml" and '"-k' in line):
                yield f"{path}:{number}: hides tests: {line.strip()}"


def ci_runs_what_people_run(source: Source) -> Iterator[str]:
    """.ci/run is scripts/check and then the tests that it left: nothing passes there that a laptop cannot repeat."""
    lines = [line.strip() for line in source.read(".ci/run").splitlines()]
    commands = [line for line in lines if line and not line.startswith(("#", "set ", "cd "))]
    if commands != ["scripts/check", "scripts/test --shards=2 --tier=rest"]:
        yield f".ci/run: runs {commands}"


def tests_are_never_skipped(source: Source) -> Iterator[str]:
    for module in source.tests:
        if str(module.path).startswith(PLUGIN_FOLDER):
            continue
        for node in module.nodes:
            if isinstance(node, ast.Attribute | ast.Name) and HIDING_NAMES.search(dotted(node)):
                yield f"{module.path}:{node.lineno}: {dotted(node)}: only tests/quarantine.toml excuses a test"
        for item in module.imports:
            if item.name is not None and HIDING_NAMES.search(f"{item.module}.{item.name}"):
                yield f"{module.path}:{item.line}: {item.name}: only tests/quarantine.toml excuses a test"


def path_exists(source: Source) -> Iterator[str]:
    """A path that a script, a document or pyproject.toml names exists: a filter cannot silently stop to match."""
    texts = source.scripts | source.documents | {"pyproject.toml": source.read("pyproject.toml")}
    for path, text in texts.items():
        for found in sorted(set(PATH.findall(text))):
            if not (source.root / found).exists() and not (source.root / found).with_suffix(".py").exists():
                yield f"{path}: {found} does not exist"


def invariant_is_everywhere(source: Source) -> Iterator[str]:
    """A number that the code or the tests name is in docs/invariants.md; one that is documented as held is in both."""
    documented = set(INVARIANT.findall(source.read("docs/invariants.md")))
    held = {number for number, places in invariant_places(source).items() if places != ("later",)}
    in_code = {number for module in source.modules for number in INVARIANT.findall(module.text)}
    tests = [module for module in source.tests if module.path.parent.name != "architecture"]
    in_tests = {number for module in tests for number in INVARIANT.findall(module.text)}
    yield from (f"docs/invariants.md: {number} is missing" for number in sorted((in_code | in_tests) - documented))
    yield from (f"{number}: no module names it" for number in sorted(held - in_code))
    yield from (f"{number}: no test names it" for number in sorted(held - in_tests))


def invariant_place_is_real(source: Source) -> Iterator[str]:
    """Every file that docs/invariants.md gives as a place where an invariant is checked names that invariant."""
    for number, places in invariant_places(source).items():
        for place in places:
            if place != "later" and number not in source.read(place):
                yield f"docs/invariants.md: {place} does not name {number}"


def invariant_places(source: Source) -> dict[str, tuple[str, ...]]:
    """By number: the files in the last column of its row, or `later`."""
    rows: dict[str, tuple[str, ...]] = {}
    for line in source.read("docs/invariants.md").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 3 and INVARIANT.fullmatch(cells[0]):
            rows[cells[0]] = ("later",) if cells[2] == "later" else tuple(re.findall(r"`([^`]+)`", cells[2]))
    return rows


def metric_is_documented(source: Source) -> Iterator[str]:
    """docs/metrics.md has a row for every metric of core/metrics.py, which has it once, and for nothing else."""
    catalogue = re.findall(r"\"((?:pdcluster_|vllm:|process_)\w+)\"", source.read("core/metrics.py"))
    rows = _rows(source, "docs/metrics.md")
    yield from (
        f"core/metrics.py: {name} is there twice" for name in sorted(set(catalogue)) if catalogue.count(name) > 1
    )
    yield from (f"docs/metrics.md: {name} is missing" for name in sorted(set(catalogue) - rows))
    yield from (f"docs/metrics.md: {name} is in no catalogue" for name in sorted(rows - set(catalogue)))


def config_key_is_documented(source: Source) -> Iterator[str]:
    """docs/configuration.md has a row for every key of core/config.py and for nothing else."""
    fields = {
        node.name: _annotations(node)
        for module in source.modules
        if module.name == "core.config"
        for node in module.tree.body
        if isinstance(node, ast.ClassDef)
    }
    keys = {
        f"{name}.{inner}" if kind in fields else name
        for name, kind in fields.get("ClusterConfig", {}).items()
        for inner in fields.get(kind, {name: ""})
    }
    rows = _rows(source, "docs/configuration.md")
    yield from (f"docs/configuration.md: {key} is missing" for key in sorted(keys - rows))
    yield from (f"docs/configuration.md: {key} is no key" for key in sorted(rows - keys))


def _annotations(node: ast.ClassDef) -> dict[str, str]:
    """Text of the annotation by name of each annotated name in a class."""
    found = [item for item in node.body if isinstance(item, ast.AnnAssign)]
    return {item.target.id: ast.unparse(item.annotation) for item in found if isinstance(item.target, ast.Name)}


def _rows(source: Source, path: str) -> set[str]:
    """What stands in code type in the first column of a document's tables."""
    return set(re.findall(r"^\| `([\w:.]+)`", source.read(path), re.MULTILINE))


def text_names_no_machine(source: Source) -> Iterator[str]:
    """No file depends on where somebody's checkout lies."""
    texts = source.scripts | source.documents | {str(m.path): m.text for m in (*source.modules, *source.tests)}
    for path, text in texts.items():
        for found in sorted(set(re.findall(r"(?<![\w.])/(?:work|root|home/\w+)/[\w./-]*", text))):
            yield f"{path}: {found} is a path of one machine"
