"""A Hugging Face model directory: its config, whether it is whole, and the identity of its weights.

Everything here runs before any worker starts, imports no torch, and reports what is wrong with file and field. Knows
nothing about how weights get into memory or where the directory came from.
"""

import hashlib
import json
import math
import os
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from core.errors import ModelLoadError
from core.ids import WeightIdentity
from core.layout import KvDtype
from engine.model.checkpoint import locate_tensors, read_bytes, read_json_object
from engine.model.config import ModelConfig, RopeScaling

CONFIG_FILE = "config.json"
GENERATION_CONFIG_FILE = "generation_config.json"
TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
IDENTITY_FILE = ".pdcluster-identity.json"
"""Cache of the weight identity, written beside the model when the directory is writable."""

SUPPORTED_ARCHITECTURES = ("LlamaForCausalLM",)
RUN_DTYPES: Mapping[str, KvDtype] = {"float32": "float32", "bfloat16": "bfloat16", "float16": "float32"}
"""Dtype of a checkpoint -> dtype to run in by default. float16 values fit into float32 exactly, into bfloat16 not."""

_IDENTITY_SCHEME = "pdcluster-weights-v1"
_NO_EFFECT_ON_KV = ("bos_token_id", "eos_token_ids", "dtype", "max_position_embeddings")


class _Fields:
    """Typed reads from one JSON object; a value of another type is a ModelLoadError that names it."""

    def __init__(self, directory: Path, file: str, values: Mapping[str, object], prefix: str = "") -> None:
        self._directory, self._file, self._values, self._prefix = directory, file, values, prefix

    def error(self, key: str, problem: str) -> ModelLoadError:
        """The error to raise about `key`."""
        return ModelLoadError(path=self._directory, file=self._file, field=self._prefix + key, problem=problem)

    def get(self, key: str) -> object:
        """The value, None when absent or null."""
        return self._values.get(key)

    def count(self, key: str, default: int | None = None) -> int:
        """A positive integer."""
        value = default if self.get(key) is None else self.get(key)
        if type(value) is not int or value <= 0:
            raise self.error(key, "is missing" if value is None else f"must be a positive integer, is {value!r}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A positive number."""
        value = default if self.get(key) is None else self.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise self.error(key, "is missing" if value is None else f"must be a positive number, is {value!r}")
        return float(value)

    def flag(self, key: str) -> bool:
        """true or false; false when absent."""
        value = self.get(key)
        if value is not None and not isinstance(value, bool):
            raise self.error(key, f"must be true or false, is {value!r}")
        return bool(value)

    def part(self, key: str) -> "_Fields":
        """A nested object; empty when absent."""
        value = self.get(key)
        if value is not None and not isinstance(value, dict):
            raise self.error(key, f"must be an object, is {value!r}")
        return _Fields(self._directory, self._file, value or {}, f"{self._prefix}{key}.")

    def token_ids(self, key: str, vocab_size: int) -> tuple[int, ...]:
        """One token id, a list of them, or none."""
        value = self.get(key)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        for token in ids:
            if type(token) is not int or not 0 <= token < vocab_size:
                raise self.error(key, f"must hold token ids in [0, {vocab_size}), holds {token!r}")
        return tuple(ids)


def read_config(path: Path) -> ModelConfig:
    """The config of the model in directory `path`.

    Its `dtype` is the one to run in by default: see `RUN_DTYPES`; float32 when config.json states none. Raises
    ModelLoadError, naming file and field of what is missing or unsupported.
    """
    fields = _Fields(path, CONFIG_FILE, read_json_object(path, CONFIG_FILE))
    _require_supported(fields)
    hidden_size, num_heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    num_kv_heads = fields.count("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise fields.error("num_key_value_heads", f"{num_kv_heads} does not divide num_attention_heads {num_heads}")
    head_dim = fields.count("head_dim", hidden_size // num_heads)
    if head_dim % 2 or (fields.get("head_dim") is None and hidden_size % num_heads):
        raise fields.error(
            "head_dim", f"must be even and given when hidden_size {hidden_size} / {num_heads} has a rest"
        )
    vocab_size = fields.count("vocab_size")
    bos = fields.token_ids("bos_token_id", vocab_size)
    rope_theta, rope_scaling = _read_rope(fields)
    return ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=fields.count("intermediate_size"),
        num_layers=fields.count("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        max_position_embeddings=fields.count("max_position_embeddings", 2048),
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
        attention_bias=fields.flag("attention_bias"),
        mlp_bias=fields.flag("mlp_bias"),
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=_read_eos(path, fields, vocab_size),
        dtype=_read_dtype(fields),
    )


def check_directory(path: Path) -> ModelConfig:
    """Everything that can be known before a worker starts: config, weight files, tokenizer, chat template.

    Reads no weights. A missing chat template is allowed. Raises ModelLoadError.
    """
    if not path.is_dir():
        raise ModelLoadError(path=path, file=".", field="path", problem="is not a directory")
    config = read_config(path)
    locate_tensors(path, config)
    _check_tokenizer(path, config.vocab_size)
    return config


def weight_identity(path: Path) -> WeightIdentity:
    """SHA-256 over what KV depends on: the config's mathematics and every tensor's name, dtype, shape and content.

    Splitting the same weights into other shards does not change it. The first call reads all weights (about 1 GB/s);
    the result is kept in `IDENTITY_FILE` and holds while config, file sizes and modification times stay the same.
    Raises ModelLoadError.
    """
    config = read_config(path)
    entries = locate_tensors(path, config)
    facts = {key: value for key, value in asdict(config).items() if key not in _NO_EFFECT_ON_KV}
    digest = hashlib.sha256(_canonical_json([_IDENTITY_SCHEME, facts]))
    stats = {file: (path / file).stat() for file in {entry.file for entry in entries.values()}}
    files = {file: [stat.st_size, stat.st_mtime_ns] for file, stat in stats.items()}
    key = hashlib.sha256(digest.digest() + _canonical_json(files)).hexdigest()
    cached = _read_cached_identity(path, key)
    if cached is not None:
        return cached
    for name, entry in entries.items():
        digest.update(_canonical_json([name, entry.dtype, entry.shape]))
        for chunk in read_bytes(path, entry):
            digest.update(chunk)
    identity = WeightIdentity(digest.hexdigest())
    if os.access(path, os.W_OK):
        _write_cached_identity(path, key, identity)
    return identity


def _require_supported(fields: _Fields) -> None:
    architectures = fields.get("architectures")
    name = architectures[0] if isinstance(architectures, list) and len(architectures) == 1 else architectures
    if name not in SUPPORTED_ARCHITECTURES:
        supported = ", ".join(SUPPORTED_ARCHITECTURES)
        raise fields.error("architectures", f"names {name!r}, which is not supported; supported: {supported}")
    quantization = fields.get("quantization_config")
    if quantization is not None:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        raise fields.error("quantization_config", f"names {method!r}; quantised checkpoints are not supported")
    if fields.get("hidden_act") not in (None, "silu"):
        raise fields.error("hidden_act", f"is {fields.get('hidden_act')!r}; supported: silu")


def _read_rope(fields: _Fields) -> tuple[float, RopeScaling | None]:
    """transformers 5 keeps all of it in `rope_parameters`; before, `rope_theta` stood beside `rope_scaling`."""
    is_new_style = fields.get("rope_parameters") is not None
    part = fields.part("rope_parameters" if is_new_style else "rope_scaling")
    theta = (part if is_new_style and part.get("rope_theta") is not None else fields).number("rope_theta", 10_000.0)
    for holder in (fields, part):
        if holder.get("partial_rotary_factor") not in (None, 1, 1.0):
            raise holder.error("partial_rotary_factor", "is not supported")
    key = "rope_type" if part.get("rope_type") is not None else "type"
    match part.get(key):
        case None if not is_new_style and fields.get("rope_scaling"):
            raise part.error("rope_type", "is missing")
        case None | "default":
            return theta, None
        case "linear":
            return theta, RopeScaling(kind="linear", factor=part.number("factor"))
        case "llama3":
            low, high = part.number("low_freq_factor"), part.number("high_freq_factor")
            if low >= high:
                raise part.error("high_freq_factor", f"{high} must exceed low_freq_factor {low}")
            original = part.count("original_max_position_embeddings")
            return theta, RopeScaling(
                kind="llama3",
                factor=part.number("factor"),
                low_freq_factor=low,
                high_freq_factor=high,
                original_max_position_embeddings=original,
            )
        case other:
            raise part.error(key, f"is {other!r}; supported: default, linear, llama3")


def _read_eos(path: Path, fields: _Fields, vocab_size: int) -> tuple[int, ...]:
    ids = fields.token_ids("eos_token_id", vocab_size)
    if (path / GENERATION_CONFIG_FILE).exists():
        generation = _Fields(path, GENERATION_CONFIG_FILE, read_json_object(path, GENERATION_CONFIG_FILE))
        ids += generation.token_ids("eos_token_id", vocab_size)
    return tuple(dict.fromkeys(ids))


def _read_dtype(fields: _Fields) -> KvDtype:
    key = "dtype" if fields.get("dtype") is not None else "torch_dtype"
    name = fields.get(key)
    if name is None:
        return "float32"
    if not isinstance(name, str) or name not in RUN_DTYPES:
        raise fields.error(key, f"is {name!r}; supported checkpoints: {', '.join(RUN_DTYPES)}")
    return RUN_DTYPES[name]


def _check_tokenizer(path: Path, vocab_size: int) -> None:
    fields = _Fields(path, TOKENIZER_FILE, read_json_object(path, TOKENIZER_FILE))
    model = fields.part("model")
    vocab = model.get("vocab")
    if isinstance(vocab, dict) and vocab:
        ids = list(vocab.values())
    elif isinstance(vocab, list) and vocab:
        ids = list(range(len(vocab)))  # Unigram: a list of (piece, score)
    else:
        raise model.error("vocab", "is missing or empty")
    _require_ids_fit(model, "vocab", ids, vocab_size)
    added = fields.get("added_tokens") or []
    if not isinstance(added, list) or not all(isinstance(token, dict) for token in added):
        raise fields.error("added_tokens", "must be a list of objects")
    _require_ids_fit(fields, "added_tokens", [token.get("id") for token in added], vocab_size)
    template = _Fields(path, TOKENIZER_CONFIG_FILE, read_json_object(path, TOKENIZER_CONFIG_FILE))
    if not isinstance(template.get("chat_template"), str | list | None):
        raise template.error("chat_template", "must be a string or a list of named templates")


def _require_ids_fit(fields: _Fields, key: str, ids: list[object], vocab_size: int) -> None:
    for token in ids:
        if type(token) is not int or not 0 <= token < vocab_size:
            problem = f"holds token id {token!r}, outside config.json's vocab_size of {vocab_size}"
            raise fields.error(key, problem)


def _canonical_json(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def _read_cached_identity(path: Path, key: str) -> WeightIdentity | None:
    try:
        cached = json.loads((path / IDENTITY_FILE).read_bytes())
    except (OSError, ValueError):
        return None  # absent or torn: hash again
    identity = cached.get("identity") if isinstance(cached, dict) and cached.get("key") == key else None
    return WeightIdentity(identity) if isinstance(identity, str) else None


def _write_cached_identity(path: Path, key: str, identity: WeightIdentity) -> None:
    with tempfile.NamedTemporaryFile(dir=path, prefix=IDENTITY_FILE, delete=False) as file:
        file.write(_canonical_json({"key": key, "identity": identity}))
    Path(file.name).replace(path / IDENTITY_FILE)
