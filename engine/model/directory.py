"""A Hugging Face model directory: its config, whether it is whole, and the identity of its weights.

Everything here runs before any worker starts, imports no torch, and reports what is wrong with file and field. Knows
nothing about how weights get into memory or where the directory came from.
"""

import hashlib
import json
import os
import tempfile
from dataclasses import asdict, replace
from pathlib import Path

from core.errors import ModelLoadError
from core.ids import WeightIdentity
from engine.model.checkpoint import locate_tensors, read_bytes, read_json_object
from engine.model.config import ModelConfig
from engine.model.families import interpret_config
from engine.model.fields import Fields

CONFIG_FILE = "config.json"
GENERATION_CONFIG_FILE = "generation_config.json"
TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
IDENTITY_FILE = ".pdcluster-identity.json"
"""Cache of the weight identity, written beside the model when the directory is writable."""

_IDENTITY_SCHEME = "pdcluster-weights-v1"
_NO_EFFECT_ON_KV = ("bos_token_id", "eos_token_ids", "dtype", "max_position_embeddings")


def read_config(path: Path) -> ModelConfig:
    """The config of the model in directory `path`.

    Its `dtype` is the one to run in by default: see `families.RUN_DTYPES`; float32 when config.json states none. Raises
    ModelLoadError, naming file and field of what is missing or unsupported.
    """
    config = interpret_config(Fields(path, CONFIG_FILE, read_json_object(path, CONFIG_FILE)))
    if not (path / GENERATION_CONFIG_FILE).exists():
        return config
    generation = Fields(path, GENERATION_CONFIG_FILE, read_json_object(path, GENERATION_CONFIG_FILE))
    ids = config.eos_token_ids + generation.token_ids("eos_token_id", config.vocab_size)
    return replace(config, eos_token_ids=tuple(dict.fromkeys(ids)))


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


def _check_tokenizer(path: Path, vocab_size: int) -> None:
    fields = Fields(path, TOKENIZER_FILE, read_json_object(path, TOKENIZER_FILE))
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
    template = Fields(path, TOKENIZER_CONFIG_FILE, read_json_object(path, TOKENIZER_CONFIG_FILE))
    if not isinstance(template.get("chat_template"), str | list | None):
        raise template.error("chat_template", "must be a string or a list of named templates")


def _require_ids_fit(fields: Fields, key: str, ids: list[object], vocab_size: int) -> None:
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
