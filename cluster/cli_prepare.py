"""Everything that `validate` and `up` check before a process starts: the YAML, the model, and whether the two fit.

Raises ConfigError or ModelLoadError. Imports neither torch nor Ray. Knows nothing about how a cluster is started.
"""

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from core.config import GIB, ClusterConfig, config_error, load_config
from core.errors import ConfigError
from core.layout import BlockLayout, KvDtype
from engine.model.catalog import resolve_model
from engine.model.config import ModelConfig
from engine.model.directory import check_directory


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A cluster that can be started."""

    file: Path
    overrides: tuple[str, ...]
    config: ClusterConfig
    model_path: Path
    """Directory of the model, absolute."""
    model: ModelConfig

    def layout(self) -> BlockLayout:
        """Layout of the KV blocks of this model."""
        dtype: KvDtype = self.model.dtype if self.config.model.dtype == "auto" else self.config.model.dtype
        return self.model.block_layout(self.config.kv.block_size, dtype)

    def block_bytes(self) -> int:
        """Bytes of one KV block of this model."""
        return self.layout().block_bytes()

    def describe(self) -> str:
        """One paragraph for people."""
        config, block_bytes = self.config, self.block_bytes()
        num_blocks = config.kv.num_blocks(block_bytes)
        workers = f"{config.decode.workers} decode"
        if config.prefill.workers:
            workers = f"{config.prefill.workers} prefill and {workers}"
        architecture = f"{self.model.architecture} of {self.model.num_layers} layers"
        size_gib = num_blocks * block_bytes / GIB
        return (
            f"cluster {config.name}: {config.mode}, {workers} worker(s), {config.numerics} numerics\n"
            f"model {config.model.path}: {architecture} in {self.model_path}\n"
            f"KV per worker: {num_blocks} blocks of {config.kv.block_size} tokens, {size_gib:.2f} GiB"
        )


def prepare(file: Path, overrides: Sequence[str]) -> Prepared:
    """Load and check everything; a bundled model or a GGUF file is imported on the way."""
    config = load_config(file, overrides)
    model_path = resolve_model(config.model.path, file.absolute().parent)
    model = check_directory(model_path)
    prepared = Prepared(file=file, overrides=tuple(overrides), config=config, model_path=model_path, model=model)
    _require_fit(prepared)
    return prepared


def _require_fit(prepared: Prepared) -> None:
    config, model = prepared.config, prepared.model
    limit = config.model.max_model_len
    if limit is not None and limit > model.max_position_embeddings:
        problem = f"{limit} tokens are more than the {model.max_position_embeddings} positions of the model"
        raise _error(prepared, "model.max_model_len", problem)
    room = prepared.layout().max_tokens(config.kv.num_blocks(prepared.block_bytes()))
    if room < (limit or 1):
        key = "kv.device_blocks" if config.kv.device_blocks is not None else "kv.device_gib"
        problem = f"the pool holds {room} tokens, fewer than one request may have ({limit or 1})"
        raise _error(prepared, key, problem, "Give it more, or set a smaller model.max_model_len.")
    if config.transfer.transport == "memory" and config.mode == "disaggregated":
        problem = "memory moves KV inside one process only, and the workers of a cluster are processes of their own"
        raise _error(prepared, "transfer.transport", problem, "Set nixl.")


def require_free_port(prepared: Prepared) -> None:
    """Raises ConfigError when something listens on the router's port already."""
    router = prepared.config.router
    family = socket.AF_INET6 if ":" in router.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server does: old connections do not count
        try:
            probe.bind((router.host, router.port))
        except OSError as error:
            problem = f"port {router.port} of {router.host} cannot be used: {error.strerror}"
            hint = f"Choose another, for example --set router.port={(router.port + 1) % 65536}; 0 takes a free one."
            raise _error(prepared, "router.port", problem, hint) from error


def _error(prepared: Prepared, key: str, problem: str, hint: str = "") -> ConfigError:
    return config_error(prepared.file, prepared.overrides, key, problem, hint)
