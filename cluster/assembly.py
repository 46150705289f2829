"""Puts a worker together from its parts: planner, runner, digests, transfer side. The same for a process of its own
and for the in-process runtime, for torch and for the stand-in runner.

Knows nothing about threads, links or Ray; imports no torch.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from core.config import ClusterConfig
from core.errors import ModelLoadError
from core.hashing import HASH_SCHEME
from core.ids import Epoch, Role, WeightIdentity, WorkerId
from core.layout import BlockLayout, Handshake, KvDtype
from core.worker import Worker
from decode.worker import DecodeSettings, DecodeWorker
from engine.kv.pool import BlockPool
from engine.kv.table import SequenceTable
from engine.model.config import ModelConfig
from engine.model.directory import read_config, weight_identity
from engine.scheduler import Scheduler
from engine.step import Runner
from kvtransfer.integrity import DIGEST_SCHEME, Digester
from kvtransfer.puller import BlockPuller
from prefill.worker import PrefillSettings, PrefillWorker

PREFILLS_RUNNING_MAX = 16
"""Prompts that one prefill worker computes side by side."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """What a worker needs to know of the model besides its weights."""

    name: str
    vocab_size: int
    eos_token_ids: frozenset[int]
    max_model_len: int
    layout: BlockLayout
    weight_identity: WeightIdentity


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerIdentity:
    """Which worker."""

    worker_id: WorkerId
    role: Role
    epoch: Epoch


def run_dtype(config: ClusterConfig, model: ModelConfig) -> KvDtype:
    """The dtype to run in: the YAML's, or the checkpoint's."""
    return model.dtype if config.model.dtype == "auto" else config.model.dtype


def max_model_len(config: ClusterConfig, model: ModelConfig, path: Path) -> int:
    """Tokens of prompt plus output at most. Raises ModelLoadError when the YAML asks for more than the model can."""
    asked = config.model.max_model_len
    if asked is not None and asked > model.max_position_embeddings:
        limit = model.max_position_embeddings
        problem = f"is {limit}, the configuration's model.max_model_len asks for {asked}"
        raise ModelLoadError(path=path, file="config.json", field="max_position_embeddings", problem=problem)
    layout = model.block_layout(config.kv.block_size, run_dtype(config, model))
    block_bytes = layout.block_bytes()
    fits = layout.max_tokens(config.kv.num_blocks(block_bytes))
    if fits < (asked or 1):
        problem = (
            f"needs {block_bytes} bytes per KV block; the pool holds {fits} tokens, fewer than one request may need"
        )
        raise ModelLoadError(path=path, file="config.json", field="num_hidden_layers", problem=problem)
    return asked or min(model.max_position_embeddings, fits)


def served_model(config: ClusterConfig, path: Path) -> ServedModel:
    """Facts of the model directory under this configuration."""
    model = read_config(path)
    return ServedModel(
        name=Path(config.model.path).name,
        vocab_size=model.vocab_size,
        eos_token_ids=frozenset(model.eos_token_ids),
        max_model_len=max_model_len(config, model, path),
        layout=model.block_layout(config.kv.block_size, run_dtype(config, model)),
        weight_identity=weight_identity(path),
    )


def build_handshake(
    config: ClusterConfig, model: ServedModel, *, num_blocks: int, transport: str, transport_metadata: bytes
) -> Handshake:
    """What a worker says of itself to peers."""
    return Handshake(
        hash_scheme=HASH_SCHEME,
        digest_scheme=DIGEST_SCHEME,
        weight_identity=model.weight_identity,
        layout=model.layout,
        numerics=config.numerics,
        num_blocks=num_blocks,
        transport=transport,
        transport_metadata=transport_metadata,
    )


def build_worker(
    identity: WorkerIdentity,
    config: ClusterConfig,
    model: ServedModel,
    *,
    runner: Runner,
    handshake: Handshake,
    digester: Digester,
    transfer: BlockPuller,
    timer: Callable[[], float] = time.perf_counter,
) -> Worker:
    """A worker of either role on this runner. `timer` measures the parts of its steps, in seconds."""
    section = config.prefill if identity.role == "prefill" else config.decode
    rows = PREFILLS_RUNNING_MAX if identity.role == "prefill" else config.decode.max_running
    scheduler = Scheduler(
        pool=BlockPool(runner.num_blocks),
        table=SequenceTable(
            num_rows=rows,
            max_model_len=model.max_model_len,
            block_size=runner.block_size,
            windows=model.layout.windows,
        ),
        max_batched_tokens=section.max_batched_tokens,
    )
    if identity.role == "prefill":
        prefill = PrefillSettings(
            worker_id=identity.worker_id,
            epoch=identity.epoch,
            handshake=handshake,
            max_model_len=model.max_model_len,
            vocab_size=model.vocab_size,
            lease_s=config.transfer.lease_s,
        )
        return PrefillWorker(
            prefill, scheduler=scheduler, runner=runner, digester=digester, serving=transfer, timer=timer
        )
    decode = DecodeSettings(
        worker_id=identity.worker_id,
        epoch=identity.epoch,
        handshake=handshake,
        max_model_len=model.max_model_len,
        vocab_size=model.vocab_size,
        eos_token_ids=model.eos_token_ids,
        credit_s=config.transfer.credit_s,
    )
    return DecodeWorker(decode, scheduler=scheduler, runner=runner, puller=transfer, timer=timer)
