"""What a `config.json` says in each supported family: Llama, Qwen2, Qwen3 and Gemma 3 (text).

Families differ in what transformers takes for granted (a default, a bias, a norm), in how windows and rotary embedding
are written, and in nothing else: all come out as one `ModelConfig`. Whatever would change results and is not
implemented is refused. Imports no torch. Knows nothing about other files of the directory.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from core.layout import KvDtype
from engine.model.config import Architecture, ModelConfig, RopeScaling
from engine.model.fields import Fields

RUN_DTYPES: Mapping[str, KvDtype] = {"float32": "float32", "bfloat16": "bfloat16", "float16": "float32"}
"""Dtype of a checkpoint -> dtype to run in by default. float16 values fit into float32 exactly, into bfloat16 not."""
FULL, WINDOW = "full_attention", "sliding_attention"
"""Values of `layer_types`, and keys of `rope_parameters` where layers differ in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What transformers takes for granted in an architecture."""

    architecture: Architecture
    model_type: str
    is_lenient: bool = False
    """Absent sizes have defaults; else they must be stated, because families' defaults have changed over time."""
    is_tied: bool = False
    """Default of `tie_word_embeddings`."""
    rope_theta: float = 10_000.0
    """Default of the full layers' theta."""
    qkv_bias: bool = False
    """The query, key and value products always have a bias and the output product never, whatever config.json says."""
    qk_norm: bool = False
    is_gemma: bool = False
    """Windows and two rotary embeddings, offset and post norms, scaled embeddings, gelu."""


FAMILIES: Mapping[str, Family] = {
    family.architecture: family
    for family in (
        Family(architecture="LlamaForCausalLM", model_type="llama", is_lenient=True),
        Family(architecture="Qwen2ForCausalLM", model_type="qwen2", qkv_bias=True),
        Family(architecture="Qwen3ForCausalLM", model_type="qwen3", qk_norm=True),
        Family(
            architecture="Gemma3ForCausalLM",
            model_type="gemma3_text",
            is_tied=True,
            rope_theta=1_000_000.0,
            qk_norm=True,
            is_gemma=True,
        ),
    )
}
GEMMA_LOCAL_THETA = 10_000.0
GEMMA_PATTERN = 6
"""Every sixth layer has no window."""

# Options that change results and are not implemented. Absent, null, false and 0 all mean: not used.
_UNSUPPORTED = (
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "use_bidirectional_attention",
    "use_sliding_window",
    "num_experts",
    "num_local_experts",
)


def interpret_config(fields: Fields) -> ModelConfig:
    """The model that a config.json describes. Raises ModelLoadError, naming what is missing or unsupported."""
    family = _require_supported(fields)
    hidden_size, num_heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    num_layers, vocab_size = fields.count("num_hidden_layers"), fields.count("vocab_size")
    num_kv_heads = fields.count("num_key_value_heads", num_heads if family.is_lenient else None)
    if num_heads % num_kv_heads:
        raise fields.error("num_key_value_heads", f"{num_kv_heads} does not divide num_attention_heads {num_heads}")
    full_rope = _full_rope_fields(fields, family)
    rope_theta, rope_scaling = _read_rope(fields, full_rope, family.rope_theta)
    bos = fields.token_ids("bos_token_id", vocab_size)
    return ModelConfig(
        architecture=family.architecture,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=fields.count("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=_read_head_dim(fields, family, hidden_size, num_heads),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        max_position_embeddings=fields.count("max_position_embeddings", 2048 if family.is_lenient else None),
        tie_word_embeddings=fields.flag("tie_word_embeddings", family.is_tied),
        attention_bias=family.qkv_bias or fields.flag("attention_bias"),
        output_bias=False if family.qkv_bias else None,
        mlp_bias=family.is_lenient and fields.flag("mlp_bias"),
        activation="gelu_tanh" if family.is_gemma else "silu",
        qk_norm=family.qk_norm,
        norm_offset=1.0 if family.is_gemma else 0.0,
        post_norms=family.is_gemma,
        scale_embeddings=family.is_gemma,
        query_pre_attn_scalar=fields.count("query_pre_attn_scalar", 256) if family.is_gemma else None,
        layer_windows=_read_windows(fields, family, num_layers),
        window_rope_theta=_read_window_theta(fields) if family.is_gemma else None,
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=tuple(dict.fromkeys(fields.token_ids("eos_token_id", vocab_size))),
        dtype=_read_dtype(fields),
    )


def _require_supported(fields: Fields) -> Family:
    architectures = fields.get("architectures")
    name = architectures[0] if isinstance(architectures, list) and len(architectures) == 1 else architectures
    family = FAMILIES.get(name) if isinstance(name, str) else None
    if family is None:
        raise fields.error("architectures", f"names {name!r}, which is not supported; supported: {', '.join(FAMILIES)}")
    model_type = fields.get("model_type")
    if model_type not in (None, family.model_type):
        problem = f"is {model_type!r}, which is not what {family.architecture} has: {family.model_type}"
        raise fields.error("model_type", problem)
    quantization = fields.get("quantization_config")
    if quantization is not None:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        raise fields.error("quantization_config", f"names {method!r}; quantised checkpoints are not supported")
    for key in _UNSUPPORTED:
        if fields.get(key):
            raise fields.error(key, f"is {fields.get(key)!r}, which is not supported; only models without it are")
    wanted = "gelu_pytorch_tanh" if family.is_gemma else "silu"
    for key in ("hidden_act", "hidden_activation"):
        if fields.get(key) not in (None, wanted):
            raise fields.error(key, f"is {fields.get(key)!r}; supported: {wanted}")
    return family


def _read_head_dim(fields: Fields, family: Family, hidden_size: int, num_heads: int) -> int:
    # With norms per head its default is a constant of the family, not what the hidden size suggests: it must be given.
    head_dim = fields.count("head_dim", None if family.qk_norm else hidden_size // num_heads)
    if head_dim % 2 or (fields.get("head_dim") is None and hidden_size % num_heads):
        problem = f"must be even and given when hidden_size {hidden_size} / {num_heads} has a rest"
        raise fields.error("head_dim", problem)
    return head_dim


def _read_windows(fields: Fields, family: Family, num_layers: int) -> tuple[int | None, ...]:
    """Written as one type per layer, or in older files as a pattern n: layers n, 2 n, ... have no window."""
    types = fields.get("layer_types")
    if types is None:
        if not family.is_gemma:
            return ()
        pattern = fields.count("sliding_window_pattern", GEMMA_PATTERN)
        types = [WINDOW if (layer + 1) % pattern else FULL for layer in range(num_layers)]
    if not isinstance(types, list) or len(types) != num_layers:
        raise fields.error("layer_types", f"must be a list of {num_layers} entries, one per layer, is {types!r}")
    supported = (FULL, WINDOW) if family.is_gemma else (FULL,)
    for layer, kind in enumerate(types):
        if kind not in supported:
            problem = f"is {kind!r} for layer {layer}; {family.architecture} supports: {', '.join(supported)}"
            raise fields.error("layer_types", problem)
    if WINDOW not in types:
        return ()
    window = fields.count("sliding_window")
    return tuple(window if kind == WINDOW else None for kind in types)


def _full_rope_fields(fields: Fields, family: Family) -> Fields:
    """Where the rotary embedding of the full layers is written.

    transformers 5 keeps all of it in `rope_parameters`, one object per layer type where types differ; before,
    `rope_theta` stood beside `rope_scaling`.
    """
    if fields.get("rope_parameters") is None:
        return fields.part("rope_scaling")
    if fields.get("rope_scaling") is not None:
        raise fields.error("rope_scaling", "stands beside rope_parameters; a file may have one of the two")
    part = fields.part("rope_parameters")
    if not family.is_gemma:
        for key in part.names():
            if isinstance(part.get(key), dict):
                raise part.error(key, "is an object; layers of different rotary embedding are not supported here")
        return part
    for key in part.names():
        if key not in (FULL, WINDOW):
            raise part.error(key, f"is not expected; the keys are {FULL} and {WINDOW}")
    return part.part(FULL)


def _read_rope(fields: Fields, part: Fields, default_theta: float) -> tuple[float, RopeScaling | None]:
    is_new_style = fields.get("rope_parameters") is not None
    holder = part if is_new_style and part.get("rope_theta") is not None else fields
    theta = holder.number("rope_theta", default_theta)
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


def _read_window_theta(fields: Fields) -> float:
    """Theta of Gemma's window layers, whose frequencies are never scaled."""
    if fields.get("rope_parameters") is None:
        return fields.number("rope_local_base_freq", GEMMA_LOCAL_THETA)
    part = fields.part("rope_parameters").part(WINDOW)
    holder, key = (part, "rope_theta") if part.get("rope_theta") is not None else (fields, "rope_local_base_freq")
    theta = holder.number(key, GEMMA_LOCAL_THETA)
    _, scaling = _read_rope(fields, part, theta)
    if scaling is not None:
        raise part.error("rope_type", f"is {scaling.kind!r}; supported for layers with a window: default")
    return theta


def _read_dtype(fields: Fields) -> KvDtype:
    key = "dtype" if fields.get("dtype") is not None else "torch_dtype"
    name = fields.get(key)
    if name is None:
        return "float32"
    if not isinstance(name, str) or name not in RUN_DTYPES:
        raise fields.error(key, f"is {name!r}; supported checkpoints: {', '.join(RUN_DTYPES)}")
    return RUN_DTYPES[name]
