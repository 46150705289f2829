"""Every field that keeps two workers apart is refused by name with both values; everything else is let through."""

import msgspec
import pytest

from core.errors import IncompatiblePeersError
from core.ids import WeightIdentity
from core.layout import BlockLayout, GroupLayout, Handshake
from kvtransfer.handshake import check_peers

GROUP = GroupLayout(kind="full", num_layers=30, num_kv_heads=3, head_dim=64, dtype="bfloat16")
SIDE = Handshake(
    hash_scheme="h",
    digest_scheme="d",
    weight_identity=WeightIdentity("w"),
    layout=BlockLayout(block_size=16, groups=(GROUP,)),
    numerics="exact",
    num_blocks=100,
    transport="nixl",
    transport_metadata=b"1",
)


def with_group(**changes: object) -> Handshake:
    group = msgspec.structs.replace(GROUP, **changes)
    return msgspec.structs.replace(SIDE, layout=BlockLayout(block_size=16, groups=(group,)))


REFUSED = {
    "protocol": msgspec.structs.replace(SIDE, protocol_min=2, protocol_max=3),
    "hash_scheme": msgspec.structs.replace(SIDE, hash_scheme="other"),
    "digest_scheme": msgspec.structs.replace(SIDE, digest_scheme="other"),
    "weight_identity": msgspec.structs.replace(SIDE, weight_identity=WeightIdentity("other")),
    "numerics": msgspec.structs.replace(SIDE, numerics="fast"),
    "transport": msgspec.structs.replace(SIDE, transport="memory"),
    "layout.block_size": msgspec.structs.replace(SIDE, layout=BlockLayout(block_size=64, groups=(GROUP,))),
    "layout.groups (count)": msgspec.structs.replace(SIDE, layout=BlockLayout(block_size=16, groups=(GROUP, GROUP))),
    "layout.groups[0].num_layers": with_group(num_layers=32),
    "layout.groups[0].num_kv_heads": with_group(num_kv_heads=4),
    "layout.groups[0].head_dim": with_group(head_dim=128),
    "layout.groups[0].dtype": with_group(dtype="float32"),
    "layout.groups[0].kind": with_group(kind="window"),
    "layout.groups[0].window": with_group(window=64),
}


@pytest.mark.parametrize("field", REFUSED)
@pytest.mark.parametrize("is_source", [True, False])
def test_peers_are_refused_by_field_and_names_when_one_field_differs(field: str, is_source: bool) -> None:
    source, target = (REFUSED[field], SIDE) if is_source else (SIDE, REFUSED[field])
    with pytest.raises(IncompatiblePeersError) as refused:
        check_peers(source, target, "prefill-0", "decode-1")
    fields = refused.value.fields
    assert (fields["field"], fields["source"], fields["target"]) == (field, "prefill-0", "decode-1")
    assert fields["source_value"] != fields["target_value"]
    for part in (field, "prefill-0", "decode-1", str(fields["source_value"]), str(fields["target_value"])):
        assert part in str(refused.value)


def test_peers_are_accepted_when_only_pool_and_address_differ() -> None:
    other = msgspec.structs.replace(SIDE, num_blocks=7, transport_metadata=b"2")
    check_peers(SIDE, other, "prefill-0", "decode-1")


def test_peers_are_accepted_when_their_protocol_ranges_overlap() -> None:
    newer = msgspec.structs.replace(SIDE, protocol_min=1, protocol_max=5)
    check_peers(newer, SIDE, "prefill-0", "decode-1")
