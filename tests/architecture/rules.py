"""Rules about the shape of the code: each takes a `Source` and returns what breaks it, one line per violation.

Rules about which package may import which are import-linter's (pyproject.toml). Knows nothing about what the code does.
"""

import ast
import re
from collections.abc import Iterator

from tests.architecture.source import STDLIB, FunctionNode, Module, Source, dotted, table, top_level_names

FILE_LINES_MAX = 400
FUNCTION_LINES_MAX = 60
LONG_FUNCTIONS: frozenset[str] = frozenset()
"""Functions allowed to be longer, as `module.function`. This set may only shrink."""

VAGUE_NAMES = frozenset({"util", "utils", "helper", "helpers", "common", "misc", "manager", "stuff"})

IMPORT_NAMES = {
    "grpcio": "grpc",
    "nixl-cu12": "nixl_cu12",
    "prometheus-client": "prometheus_client",
    "pyyaml": "yaml",
}
"""Import name of a distribution, where it is another."""

COMPANIONS = frozenset({"nixl", "nixl_cu13", "pydantic_core", "starlette"})
"""Imported beside a declared distribution: parts of it that have a name of their own, and NIXL's other builds."""

OUTERMOST_LOOPS: frozenset[str] = frozenset({"cluster.actors._run", "kvtransfer.puller_thread._run"})
"""Functions that run a thread or task to its end, as `module.function`: they may keep any exception for its owner."""

UNSAFE_MODULES = frozenset({"pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve"})
UNSAFE_CALLS = frozenset({"torch.load", "eval", "exec", "os.system"})

SEEDED = re.compile(r"random\.(?:Random|default_rng)$|torch\.seed$")

SHARED_NAMES = frozenset({"main", "logger", "NAME"})
"""Public names that several modules may define: entry points, and each module's log and transport's name."""

LIMIT = re.compile(r"_(?:S|MS|MAX|MIN|BYTES)$")
"""Names of limits, which several modules may choose for themselves."""


def file_is_short(source: Source) -> Iterator[str]:
    for module in (*source.modules, *source.tests):
        if (lines := len(module.text.splitlines())) > FILE_LINES_MAX:
            yield f"{module.path}: {lines} lines, at most {FILE_LINES_MAX}"


def function_is_short(source: Source) -> Iterator[str]:
    for module in (*source.modules, *source.tests):
        for node in module.nodes:
            if isinstance(node, FunctionNode) and f"{module.name}.{node.name}" not in LONG_FUNCTIONS:
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > FUNCTION_LINES_MAX:
                    yield f"{module.path}:{node.lineno}: {node.name} has {lines} lines, at most {FUNCTION_LINES_MAX}"


def long_function_is_long(source: Source) -> Iterator[str]:
    """The allow-list shrinks: an entry that is not needed must go."""
    found = {
        f"{module.name}.{node.name}"
        for module in (*source.modules, *source.tests)
        for node in module.nodes
        if isinstance(node, FunctionNode) and (node.end_lineno or 0) - node.lineno + 1 > FUNCTION_LINES_MAX
    }
    yield from (f"LONG_FUNCTIONS: {name} is short or gone" for name in sorted(LONG_FUNCTIONS - found))


def name_is_a_noun_of_its_own(source: Source) -> Iterator[str]:
    for module in (*source.modules, *source.tests):
        if VAGUE_NAMES & set(module.name.split(".")):
            yield f"{module.path}: say what is in it"


def package_file_is_empty(source: Source) -> Iterator[str]:
    for module in source.modules:
        if module.is_package and module.text.strip():
            yield f"{module.path}: __init__.py stays empty"
    yield from (f"{module.path}: tests have no __init__.py" for module in source.tests if module.is_package)


def module_has_docstring(source: Source) -> Iterator[str]:
    for module in source.modules:
        if not module.is_package and not ast.get_docstring(module.tree):
            yield f"{module.path}: begins with a docstring that says what it is and what it knows nothing about"


def package_is_listed(source: Source) -> Iterator[str]:
    """pyproject.toml lists exactly the folders that hold modules, so that a wheel is complete."""
    found = {".".join(module.path.parent.parts) for module in source.modules}
    listed = set(source.packages)
    yield from (f"pyproject.toml: package {name} is not listed" for name in sorted(found - listed))
    yield from (f"pyproject.toml: package {name} has no module" for name in sorted(listed - found))
    marked = {module.name for module in source.modules if module.is_package}
    yield from (f"{name.replace('.', '/')}/__init__.py is missing" for name in sorted(found - marked))
    layers = str(table(source.project, "tool", "importlinter").get("contracts"))
    yield from (f"pyproject.toml: no contract names {name}" for name in source.roots if f"'{name}'" not in layers)


def dependency_is_declared_and_used(source: Source) -> Iterator[str]:
    project = table(source.project, "project")
    requirements, extras = project["dependencies"], table(project, "optional-dependencies")
    assert isinstance(requirements, list)
    optional = [text for extra in extras.values() if isinstance(extra, list) for text in extra]
    for requirement in [*requirements, *optional]:
        if not re.search(r"==|<", str(requirement)):
            yield f"pyproject.toml: {requirement} has no upper bound"
    names = [re.split(r"[<>=!~\[; ]", str(requirement))[0] for requirement in requirements]
    declared = {IMPORT_NAMES.get(name, name.replace("-", "_")) for name in names}
    imported = {item.module.partition(".")[0]: module for module in source.modules for item in module.imports}
    for name in sorted(declared - set(imported) - _strings(source)):
        yield f"pyproject.toml: nothing imports {name}"
    for name in sorted(set(imported) - declared - STDLIB - set(source.roots) - COMPANIONS):
        yield f"{imported[name].path}: imports {name}, which pyproject.toml does not name"


def errors_stand_alone(source: Source) -> Iterator[str]:
    for module in source.modules:
        if module.name == "core.errors":
            for item in module.imports:
                if item.module.partition(".")[0] not in STDLIB:
                    yield f"{module.path}:{item.line}: imports {item.module}, only the standard library may be"


def modules_form_no_cycle(source: Source) -> Iterator[str]:
    """No module imports itself through others, imports in functions and under TYPE_CHECKING included."""
    names = {module.name for module in source.modules}
    graph = {
        module.name: names & {name for item in module.imports for name in (item.module, f"{item.module}.{item.name}")}
        for module in source.modules
    }
    while ends := [name for name, targets in graph.items() if not targets & set(graph) or not _importers(graph, name)]:
        for name in ends:
            del graph[name]
    yield from (f"{name} is in a cycle with {', '.join(sorted(graph[name] & set(graph)))}" for name in sorted(graph))


def _importers(graph: dict[str, set[str]], name: str) -> bool:
    return any(name in targets for targets in graph.values())


def public_name_has_one_home(source: Source) -> Iterator[str]:
    homes: dict[str, list[str]] = {}
    for module in source.modules:
        for name in dict(top_level_names(module)):
            if not name.startswith("_") and name not in SHARED_NAMES and not LIMIT.search(name):
                homes.setdefault(name, []).append(module.name)
    yield from (f"{name} is defined in {', '.join(found)}" for name, found in sorted(homes.items()) if len(found) > 1)


def name_is_imported_from_its_home(source: Source) -> Iterator[str]:
    """`from a import X` where X is defined in b and only imported into a breaks when a stops using it."""
    defined = {module.name: dict(top_level_names(module)) for module in (*source.modules, *source.tests)}
    for module in (*source.modules, *source.tests):
        for item in module.imports:
            if item.module not in defined or item.name is None or item.name in defined[item.module]:
                continue
            if f"{item.module}.{item.name}" not in defined and not _is_folder(source, f"{item.module}.{item.name}"):
                yield f"{module.path}:{item.line}: {item.name} is not defined in {item.module}"


def bytes_are_never_code(source: Source) -> Iterator[str]:
    for module in source.modules:
        for item in module.imports:
            if item.module.partition(".")[0] in UNSAFE_MODULES:
                yield f"{module.path}:{item.line}: {item.module} turns bytes into code"
        for node in module.nodes:
            if isinstance(node, ast.Call) and dotted(node.func) in UNSAFE_CALLS:
                yield f"{module.path}:{node.lineno}: {dotted(node.func)} is not used here"


def failure_is_not_swallowed(source: Source) -> Iterator[str]:
    """A handler for every exception re-raises or ends the process; one that does nothing says why."""
    for module in source.modules:
        allowed = {handler for name, handler in _handlers(module) if name in OUTERMOST_LOOPS and handler.name}
        for node in module.nodes:
            if isinstance(node, ast.ExceptHandler) and node not in allowed and _is_swallowing(node, module):
                yield f"{module.path}:{node.lineno}: this handler hides failures"
            elif isinstance(node, ast.Call) and _is_suppressing(node):
                yield f"{module.path}:{node.lineno}: suppresses every exception"


def outermost_loop_is_needed(source: Source) -> Iterator[str]:
    """OUTERMOST_LOOPS names no function that has gone or obeys the rule."""
    needed = {
        name for module in source.modules for name, handler in _handlers(module) if _is_swallowing(handler, module)
    }
    yield from (f"OUTERMOST_LOOPS: {name} is not needed" for name in sorted(OUTERMOST_LOOPS - needed))


def _handlers(module: Module) -> Iterator[tuple[str, ast.ExceptHandler]]:
    """(module.function, handler) of every exception handler inside a function."""
    for function in module.nodes:
        if isinstance(function, FunctionNode):
            for node in ast.walk(function):
                if isinstance(node, ast.ExceptHandler):
                    yield f"{module.name}.{function.name}", node


def _is_suppressing(call: ast.Call) -> bool:
    kinds = {dotted(argument) for argument in call.args}
    return dotted(call.func).endswith("suppress") and bool(kinds & {"Exception", "BaseException"})


def _is_swallowing(handler: ast.ExceptHandler, module: Module) -> bool:
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    catches_all = any(kind is None or dotted(kind) in ("Exception", "BaseException") for kind in kinds)
    calls = {dotted(node.func) for node in ast.walk(handler) if isinstance(node, ast.Call)}
    ends = any(isinstance(node, ast.Raise) for node in ast.walk(handler)) or bool(calls & {"os._exit", "sys.exit"})
    lines = module.text.splitlines()
    is_mute = all(isinstance(node, ast.Pass) and "#" not in lines[node.lineno - 1] for node in handler.body)
    return is_mute or (catches_all and not ends)


def randomness_has_a_seed(source: Source) -> Iterator[str]:
    for module in (*source.modules, *source.tests):
        for node in module.nodes:
            if isinstance(node, ast.Call) and not node.args and not node.keywords and SEEDED.search(dotted(node.func)):
                yield f"{module.path}:{node.lineno}: {dotted(node.func)}() without a seed"


def tests_do_not_sleep(source: Source) -> Iterator[str]:
    for module in source.tests:
        for node in module.nodes:
            if isinstance(node, ast.Call) and dotted(node.func) == "time.sleep":
                yield f"{module.path}:{node.lineno}: waits on real time"
        for item in module.imports:
            if (item.module, item.name) == ("time", "sleep"):
                yield f"{module.path}:{item.line}: waits on real time"


def tests_mirror_packages(source: Source) -> Iterator[str]:
    """A test file lies in the folder of the package that it tests, or in one of the folders for all of them."""
    packages = {("tests", *name.split(".")) for name in source.packages}
    shared = {("tests", name) for name in ("architecture", "chaos", "e2e", "plugins", "scripts")}
    for module in source.tests:
        folder = module.path.parent.parts
        if module.path.name.startswith("test_") and folder not in packages and folder not in shared:
            yield f"{module.path}: mirrors no package"


def _strings(source: Source) -> set[str]:
    """Every string in the packages: a module may be imported by its name in one."""
    nodes = (node for module in source.modules for node in module.nodes if isinstance(node, ast.Constant))
    return {node.value for node in nodes if isinstance(node.value, str)}


def _is_folder(source: Source, name: str) -> bool:
    return (source.root / name.replace(".", "/")).is_dir()
