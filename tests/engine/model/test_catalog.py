"""What `model.path` means, and what the cache holds."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from core.errors import ModelLoadError
from engine.model import catalog
from engine.model.catalog import CACHE_VARIABLE, cache_directory, import_model, list_models, resolve_model

WriteDirectory = Callable[..., Path]
WriteGguf = Callable[..., Path]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_cache_lies_in_the_home_directory_unless_named(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache_directory() == cache
    monkeypatch.delenv(CACHE_VARIABLE)
    monkeypatch.setenv("HOME", "/nowhere")
    assert cache_directory() == Path("/nowhere/.cache/pdcluster/models")


def test_directory_is_itself_when_relative_or_absolute(write_directory: WriteDirectory, tmp_path: Path) -> None:
    path = write_directory("model")
    assert resolve_model("model", tmp_path) == path
    assert resolve_model(str(path), Path("/nowhere")) == path


def test_gguf_is_imported_once_and_keyed_by_content(cache: Path, write_gguf: WriteGguf, tmp_path: Path) -> None:
    first = write_gguf("Tiny Model.gguf")
    path = resolve_model(first.name, tmp_path)
    assert path.parent == cache
    assert path.name.startswith("tiny-model-")
    assert import_model(str(first)) == path
    first.unlink()
    assert resolve_model(write_gguf("Tiny Model.gguf", rope_theta=99.0).name, tmp_path) != path
    assert len(list_models()) == 2


def test_models_are_listed_with_their_size(cache: Path, write_gguf: WriteGguf) -> None:
    assert list_models() == []
    path = import_model(str(write_gguf()))
    (entry,) = list_models()
    assert (entry.name, entry.path) == (path.name, path)
    assert entry.size_bytes == sum(file.stat().st_size for file in path.iterdir())


@pytest.mark.parametrize("path", ["absent", "model.bin", "absent.gguf"])
def test_path_is_named_when_it_is_no_model(cache: Path, tmp_path: Path, path: str) -> None:
    (tmp_path / "model.bin").write_bytes(b"")
    with pytest.raises(ModelLoadError, match=f"{path}: .*neither a model directory.*smollm2"):
        resolve_model(path, tmp_path)


def test_file_is_named_when_there_is_no_gguf_to_import(cache: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"absent\.gguf: file: cannot be read: No such file"):
        import_model(str(tmp_path / "absent.gguf"))


def test_extra_is_named_when_the_bundled_package_is_missing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog, "BUNDLED_PACKAGES", {"smollm2": "no_such_package"})
    with pytest.raises(ModelLoadError, match="no_such_package: package: is not installed; install the extra `demo`"):
        resolve_model("smollm2", Path("/"))


def test_bundled_file_is_found_without_importing_its_package(
    cache: Path, write_gguf: WriteGguf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "packages" / "bundled_for_test"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('its dependencies are not installed')")
    write_gguf().rename(package / "weights.gguf")
    monkeypatch.syspath_prepend(package.parent)
    monkeypatch.setattr(catalog, "BUNDLED_PACKAGES", {"smollm2": package.name})
    path = resolve_model("smollm2", Path("/"))
    assert path.name.startswith("smollm2-")
    assert package.name not in sys.modules
    (package / "second.gguf").write_bytes(b"")
    with pytest.raises(ModelLoadError, match=r"\*\.gguf: package: holds 2 such files"):
        import_model("smollm2")
