"""The YAML that describes one cluster: its schema, its defaults, and errors naming file, line, key and the nearest key.

One file, one `ClusterConfig`. `--set path=value` changes a key before anything is checked, so that a file and an
override obey the same rules. All problems of a file are reported together: the first is raised, the others are its
notes (`__notes__`). Knows nothing about models, hardware or Ray: what depends on them is checked by `up`, before it
starts anything.
"""

import difflib
import ipaddress
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator
from pydantic_core import ErrorDetails

from core.config_source import ConfigSource, Key, dump_yaml
from core.errors import ConfigError

SCHEMA_VERSION = 1
FILE_BYTES_MAX = 1024 * 1024
GIB = 1024**3

PositiveInt = Annotated[int, Field(ge=1)]
PositiveSeconds = Annotated[float, Field(gt=0)]
Port = Annotated[int, Field(ge=0, le=65535)]
Name = Annotated[str, StringConstraints(pattern=r"^[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?$")]
Text = Annotated[str, StringConstraints(min_length=1)]


class Section(BaseModel):
    """Base of all sections: immutable, no unknown keys, no conversion of types (an integer is a number, though)."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class ModelSection(Section):
    """Which model is served, and how."""

    path: Text
    """A name of the catalogue (`pdcluster model list`), a Hugging Face directory, or a GGUF file."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """`auto`: the checkpoint's own."""
    max_model_len: PositiveInt | None = None
    """Tokens of prompt plus output at most; None: what the model was trained for, or the pool holds if that is less."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto`: CUDA for workers that have a GPU, else the CPU."""


class KvSection(Section):
    """The pool of KV blocks of each worker."""

    block_size: Annotated[int, Field(ge=1, le=1024)] = 16
    """Token positions of a block."""
    device_blocks: PositiveInt | None = None
    """Blocks of each worker's pool. Exactly one of device_blocks and device_gib is given."""
    device_gib: Annotated[float, Field(gt=0)] | None = None
    """Size of each worker's pool, GiB."""

    def num_blocks(self, block_bytes: int) -> int:
        """Blocks in each worker's pool, when one block takes `block_bytes` bytes."""
        if self.device_blocks is not None:
            return self.device_blocks
        assert self.device_gib is not None, "load_config requires one of the two"
        return int(self.device_gib * GIB) // block_bytes


class RouterSection(Section):
    """The HTTP front end."""

    host: Text = "127.0.0.1"
    port: Port = 8000
    """0 chooses a free port."""
    processes: Annotated[int, Field(ge=1, le=64)] = 1
    """Router processes that share the port."""
    max_requests: PositiveInt = 256
    """Prompts in flight per router process; more are refused with 503."""
    max_running_sequences: PositiveInt = 512
    """Choices in flight per router process, each prompt's `n` counted; more are refused with 503."""
    max_queued_prompt_tokens: PositiveInt = 262_144
    """Prompt tokens of requests without a first token yet, per router process; more are refused with 503."""
    max_connections: PositiveInt = 512
    """Open client connections per router process; more are refused with 503."""
    request_timeout_s: PositiveSeconds = 600.0
    prompt_stall_s: PositiveSeconds = 300.0
    """Without progress for so long before its first token, queueing included, a request is tried on other workers."""
    stream_stall_s: PositiveSeconds = 120.0
    """Without a new token for so long after its first, a request ends with an error."""


class PrefillSection(Section):
    """The workers that compute prompts."""

    workers: Annotated[int, Field(ge=0, le=1024)] = 1
    """0, and 0 by default, in colocated mode."""
    cpus: PositiveInt = 1
    """CPUs, and threads of the model, per worker."""
    gpus: Annotated[float, Field(ge=0)] = 0.0
    """GPUs per worker; a fraction shares one."""
    max_batched_tokens: PositiveInt = 512
    """Prompt tokens computed in one step, and the largest chunk."""


class DecodeSection(Section):
    """The workers that generate tokens."""

    workers: Annotated[int, Field(ge=1, le=1024)] = 1
    cpus: PositiveInt = 1
    """CPUs, and threads of the model, per worker."""
    gpus: Annotated[float, Field(ge=0)] = 0.0
    """GPUs per worker; a fraction shares one."""
    max_running: PositiveInt = 16
    """Sequences in one step."""
    max_batched_tokens: PositiveInt = 512
    """Tokens computed in one step: one per running sequence, and prompt chunks."""


class TransferSection(Section):
    """How KV blocks move between workers."""

    transport: Literal["nixl", "memory"] = "nixl"
    """`memory` works inside one process only."""
    lease_s: PositiveSeconds = 15.0
    """How long a prefill worker keeps offered blocks without hearing from their reader."""
    credit_s: PositiveSeconds = 60.0
    """How long a decode worker waits for the first offer, the prompt's time in the prefill queue included."""


class RaySection(Section):
    """The Ray cluster that holds the workers."""

    address: Text | None = None
    """host:port of a running Ray head; None: `up` starts one and `down` ends it."""
    node_ip_address: Text = "127.0.0.2"
    """Address of the Ray node that `up` starts, and of the workers' link servers."""
    port: Port | None = None
    """Of the Ray head that `up` starts; None chooses a free one."""


class ClusterConfig(Section):
    """One cluster."""

    schema_version: Literal[1]
    name: Name
    mode: Literal["disaggregated", "colocated"] = "disaggregated"
    numerics: Literal["exact", "fast"] = "exact"
    model: ModelSection
    kv: KvSection = KvSection(device_gib=1.0)
    router: RouterSection = RouterSection()
    prefill: PrefillSection = PrefillSection()
    decode: DecodeSection = DecodeSection()
    transfer: TransferSection = TransferSection()
    ray: RaySection = RaySection()

    @model_validator(mode="before")
    @classmethod
    def _colocated_has_no_prefill_workers(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("mode") == "colocated":
            prefill = data.get("prefill", {})
            if isinstance(prefill, dict) and "workers" not in prefill:
                return {**data, "prefill": {**prefill, "workers": 0}}
        return data


def load_config(path: Path, overrides: Sequence[str] = ()) -> ClusterConfig:
    """Read, override, check. Raises ConfigError; its notes are the file's other problems.

    `overrides` are `path=value` strings such as `prefill.workers=2`, the value a YAML scalar; in errors, their number
    stands for the line.
    """
    try:
        with path.open("rb") as file:
            raw = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(file=str(path), line=0, key="file", problem=f"cannot be read: {error.strerror}") from error
    if len(raw) > FILE_BYTES_MAX:
        raise ConfigError(file=str(path), line=0, key="file", problem=f"is larger than {FILE_BYTES_MAX} bytes")
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(file=str(path), line=0, key="file", problem=f"is not UTF-8 text: {error.reason}") from error
    return parse_config(text, file=str(path), overrides=overrides)


def parse_config(text: str, *, file: str, overrides: Sequence[str] = ()) -> ClusterConfig:
    """As `load_config`, for YAML already read; `file` is its name in errors."""
    source = _read_source(file, text, overrides)
    version = source.data.get("schema_version")
    if version != SCHEMA_VERSION or isinstance(version, bool):
        problem = "is required" if version is None else f"{version!r} is not supported"
        raise source.error(
            ("schema_version",), problem, f"This version of pdcluster reads schema_version: {SCHEMA_VERSION}."
        )
    try:
        config = ClusterConfig.model_validate(source.data)
    except ValidationError as error:
        raise _first([_explain(source, detail) for detail in error.errors(include_url=False)]) from None
    problems = [source.error(key, problem, hint) for key, problem, hint in _contradictions(config)]
    if problems:
        raise _first(problems)
    return config


def config_error(path: Path, overrides: Sequence[str], key: str, problem: str, hint: str = "") -> ConfigError:
    """An error at a dotted key of a file that `load_config` took, for what only shows outside of it (model, ports)."""
    source = _read_source(str(path), path.read_text(encoding="utf-8"), overrides)
    return source.error(tuple(key.split(".")), problem, hint)


def effective_config(config: ClusterConfig) -> str:
    """The whole configuration as YAML, defaults included, for the log."""
    return dump_yaml(config.model_dump())


def _read_source(file: str, text: str, overrides: Sequence[str]) -> ConfigSource:
    source = ConfigSource(file)
    source.read(text)
    for number, override in enumerate(overrides, start=1):
        source.override(override, number)
    return source


def _first(problems: list[ConfigError]) -> ConfigError:
    problems.sort(key=lambda error: (error.fields["file"] == "--set", error.line))
    for other in problems[1:]:
        problems[0].add_note(str(other))
    return problems[0]


_EXPECTED = {
    "int_type": "an integer",
    "float_type": "a number",
    "string_type": "a string",
    "bool_type": "true or false",
    "model_type": "a section of keys and values",
    "finite_number": "a finite number",
}


def _explain(source: ConfigSource, detail: ErrorDetails) -> ConfigError:
    """One of pydantic's errors in the words of the file."""
    key: Key = tuple(str(part) for part in detail["loc"])
    kind, given, context = detail["type"], detail["input"], detail.get("ctx", {})
    if kind == "extra_forbidden":
        return source.error(key, "unknown key", _nearest_key(key))
    if kind == "missing":
        return source.error(key, "is required")
    if kind in _EXPECTED:
        return source.error(key, f"expected {_EXPECTED[kind]}, found {_describe(given)}")
    if kind == "literal_error":
        return source.error(key, f"must be {context['expected']}, not {_describe(given)}")
    if kind == "string_pattern_mismatch":
        return source.error(key, f"{given!r} must be 1 to 40 lower-case letters, digits and inner hyphens")
    message = detail["msg"].replace("Input should", "must").replace("String should", "must")
    return source.error(key, f"{message}, found {_describe(given)}")


def _describe(value: object) -> str:
    match value:
        case None:
            return "nothing"
        case bool():
            return f"the boolean {str(value).lower()}"
        case str():
            return f"the string '{value}'"
        case dict():
            return "a section"
        case list():
            return "a list"
    return f"{value}"


def _sections() -> Iterator[tuple[Key, Mapping[str, Any]]]:
    """Every section of the schema, the root first, with its fields."""
    yield (), ClusterConfig.model_fields
    for name, field in ClusterConfig.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            yield (name,), field.annotation.model_fields


def _nearest_key(key: Key) -> str:
    sections = dict(_sections())
    *parents, name = key
    siblings = list(sections.get(tuple(parents), {}))
    if close := difflib.get_close_matches(name, siblings, n=1):
        return f"Did you mean `{'.'.join([*parents, close[0]])}`?"
    everywhere = {leaf: ".".join((*section, leaf)) for section, fields in sections.items() for leaf in fields}
    if close := difflib.get_close_matches(name, list(everywhere), n=1):
        return f"Did you mean `{everywhere[close[0]]}`?"
    return f"Valid keys here: {', '.join(siblings)}." if siblings else ""


def is_loopback(host: str) -> bool:
    """Whether an address or host name is this machine's loopback. Never asks a name server."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _contradictions(config: ClusterConfig) -> Iterator[tuple[Key, str, str]]:
    """Combinations that cannot work: (key, problem, hint)."""
    kv, model = config.kv, config.model
    if config.mode == "disaggregated" and config.prefill.workers == 0:
        yield ("prefill", "workers"), "disaggregated mode needs at least one prefill worker", "Or set mode: colocated."
    if config.mode == "colocated" and config.prefill.workers > 0:
        yield (
            ("prefill", "workers"),
            "colocated mode has no prefill workers",
            "Leave it out, or set mode: disaggregated.",
        )
    if (kv.device_blocks is None) == (kv.device_gib is None):
        yield ("kv",), "exactly one of device_blocks and device_gib must be given", ""
    if kv.device_blocks is not None and (model.max_model_len or 0) > (room := kv.device_blocks * kv.block_size):
        problem = (
            f"{model.max_model_len} tokens never fit the pool: {kv.device_blocks} blocks of {kv.block_size} hold {room}"
        )
        yield ("model", "max_model_len"), problem, ""
    roles = [("decode", config.decode)] + ([("prefill", config.prefill)] if config.prefill.workers else [])
    for role, section in roles:
        if model.device == "cpu" and section.gpus > 0:
            yield (role, "gpus"), "model.device is cpu, so no worker uses a GPU", "Leave it out, or set model.device."
        if model.device == "cuda" and section.gpus == 0:
            yield (role, "gpus"), "model.device is cuda, so each worker needs a GPU", f"Set {role}.gpus."
        if section.max_batched_tokens < kv.block_size:
            yield (role, "max_batched_tokens"), f"is smaller than one block of {kv.block_size} tokens", ""
    if config.decode.max_batched_tokens < config.decode.max_running:
        yield ("decode", "max_batched_tokens"), f"is smaller than decode.max_running ({config.decode.max_running})", ""
    if config.router.processes > 1 and config.router.port == 0:
        yield ("router", "port"), "router processes share one port, so it cannot be chosen at start", "Give a port."
    for key, host in (
        (("router", "host"), config.router.host),
        (("ray", "node_ip_address"), config.ray.node_ip_address),
    ):
        if not is_loopback(host):
            yield (
                key,
                f"'{host}' is not a loopback address; that needs the cluster secret, which is not available yet",
                "",
            )
