"""Whether two workers can exchange KV blocks: their handshakes compared field by field.

Refuses what cannot be mapped and names the field and both sides; never compares package versions. Knows nothing about
how the handshakes travel.
"""

from core.errors import IncompatiblePeersError
from core.layout import BlockLayout, Handshake

_EQUAL_FIELDS = ("hash_scheme", "digest_scheme", "weight_identity", "numerics", "transport")
_GROUP_FIELDS = ("kind", "num_layers", "num_kv_heads", "head_dim", "dtype", "window")


def check_peers(source: Handshake, target: Handshake, source_name: str, target_name: str) -> None:
    """Raise IncompatiblePeersError for the first field that keeps `target` from reading blocks of `source`."""
    if source.protocol_max < target.protocol_min or target.protocol_max < source.protocol_min:
        ranges = [f"{side.protocol_min} to {side.protocol_max}" for side in (source, target)]
        raise _refusal("protocol", ranges[0], ranges[1], source_name, target_name)
    pairs = [(field, getattr(source, field), getattr(target, field)) for field in _EQUAL_FIELDS]
    pairs += _layout_pairs(source.layout, target.layout)
    for field, source_value, target_value in pairs:
        if source_value != target_value:
            raise _refusal(field, source_value, target_value, source_name, target_name)


def _layout_pairs(source: BlockLayout, target: BlockLayout) -> list[tuple[str, object, object]]:
    pairs: list[tuple[str, object, object]] = [
        ("layout.block_size", source.block_size, target.block_size),
        ("layout.groups (count)", len(source.groups), len(target.groups)),
    ]
    for index, (near, far) in enumerate(zip(source.groups, target.groups, strict=False)):
        pairs += [
            (f"layout.groups[{index}].{field}", getattr(near, field), getattr(far, field)) for field in _GROUP_FIELDS
        ]
    return pairs


def _refusal(
    field: str, source_value: object, target_value: object, source_name: str, target_name: str
) -> IncompatiblePeersError:
    return IncompatiblePeersError(
        source=source_name, target=target_name, field=field, source_value=source_value, target_value=target_value
    )
