"""Goal: every module can be the first one that a process imports, and no process loads a library that it does not use.

Method: a child interpreter forks once per module, so that each starts from a clean table of modules. Modules that
load torch or Ray when imported are left to the marked tests, as the import statements say.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.architecture.source import REPOSITORY, STDLIB, Source, repository

IMPORT_TIMEOUT_S = 300
HEAVY = ("torch", "ray", "transformers")
HTTP_STACK = ("fastapi", "starlette", "uvicorn", "httpx")

FORKING = """
import importlib, json, os, sys, traceback
for name in json.loads(sys.argv[1]):
    if name.startswith("+"):
        importlib.import_module(name[1:])
    elif not os.fork():
        try:
            importlib.import_module(name)
        except BaseException:
            os.write(1, (name + " " + traceback.format_exc()).encode())
        os._exit(0)
try:
    while True:
        os.wait()
except ChildProcessError:
    sys.exit()
"""
"""Imports each module of the list in a process of its own; one with a plus sign is imported before the others fork."""

LOADED = """
import importlib, json, sys
for name in json.loads(sys.argv[1]):
    importlib.import_module(name)
print(json.dumps(sorted({name.partition(".")[0] for name in sys.modules})))
"""


def child(program: str, names: list[str], root: Path = REPOSITORY) -> str:
    """Output of a program in a fresh interpreter, errors included."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    result = subprocess.run(
        [sys.executable, "-c", program, json.dumps(names)],
        cwd=root,
        env=environment | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=IMPORT_TIMEOUT_S,
        check=False,
    )
    return result.stdout + result.stderr


def loads_on_import(source: Source, name: str, libraries: tuple[str, ...]) -> bool:
    """Does importing this module execute an import of one of the libraries, in it or in what it imports?"""
    modules = {module.name: module for module in source.modules}
    seen, queue = {name}, [name]
    while queue:
        for item in modules[queue.pop()].imports:
            if item.is_lazy:
                continue
            if item.module.partition(".")[0] in libraries:
                return True
            for target in (item.module, f"{item.module}.{item.name}"):
                if target in modules and target not in seen:
                    seen.add(target)
                    queue.append(target)
    return False


def names(*libraries: str) -> list[str]:
    """Modules that load one of these libraries when imported; without an argument those that load no heavy one."""
    source, wanted = repository(), libraries or HEAVY
    return [m.name for m in source.modules if loads_on_import(source, m.name, wanted) == bool(libraries)]


def libraries(modules: list[str]) -> list[str]:
    """What these modules import besides the standard library and ours: imported once, before the children fork."""
    source = repository()
    tops = {i.module.partition(".")[0] for m in source.modules if m.name in modules for i in m.imports if not i.is_lazy}
    return [f"+{name}" for name in sorted(tops - STDLIB - set(source.roots) - set(HEAVY))]


def test_module_is_importable_alone_when_it_needs_python_only() -> None:
    assert child(FORKING, [*libraries(names()), *names()]) == ""


@pytest.mark.torch
def test_module_is_importable_alone_when_it_needs_torch() -> None:
    assert child(FORKING, ["+torch", *libraries(names("torch")), *names("torch")]) == ""


@pytest.mark.ray
def test_module_is_importable_alone_when_it_needs_ray() -> None:
    assert child(FORKING, names("ray")) == ""


def test_import_fails_when_module_is_broken(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import missing_module\n")
    assert "missing_module" in child(FORKING, ["broken", "json"], tmp_path)


def test_module_is_left_to_marked_tests_when_it_loads_torch(tmp_path: Path) -> None:
    (tmp_path / "core").mkdir()
    (tmp_path / "pyproject.toml").write_text('[tool.setuptools]\npackages = ["core"]\n')
    (tmp_path / "core/far.py").write_text("import torch\n")
    (tmp_path / "core/near.py").write_text("from core import far\n")
    (tmp_path / "core/late.py").write_text("def load():\n    import torch\n")
    source = Source(root=tmp_path)
    assert {m.name: loads_on_import(source, m.name, ("torch",)) for m in source.modules} == {
        "core.far": True,
        "core.late": False,
        "core.near": True,
    }


def loaded(*packages: str) -> set[str]:
    """Top-level modules in a fresh interpreter that imported everything of these packages."""
    wanted = [m.name for m in repository().modules if any(m.name == p or m.name.startswith(f"{p}.") for p in packages)]
    output = child(LOADED, wanted)
    assert output.startswith("["), output
    return set(json.loads(output))


def test_router_loads_no_torch_when_all_of_it_is_imported() -> None:
    assert loaded("core", "router") & set(HEAVY) == set()


def test_roles_load_neither_torch_nor_http_when_all_of_them_are_imported() -> None:
    assert loaded("core", "prefill", "decode") & {*HEAVY, *HTTP_STACK} == set()


def test_cluster_in_one_process_loads_neither_torch_nor_ray_nor_http_when_imported() -> None:
    assert loaded("cluster.local", "cluster.local_runtime", "cluster.controller") & {*HEAVY, *HTTP_STACK} == set()


def test_errors_load_only_the_standard_library_when_imported() -> None:
    assert loaded("core.errors") & {"numpy", "msgspec", "pydantic", *HEAVY, *HTTP_STACK} == set()


@pytest.mark.torch
def test_worker_process_loads_no_http_stack_when_imported() -> None:
    found = loaded("cluster.worker_process")
    assert found & {"ray", *HTTP_STACK} == set()
