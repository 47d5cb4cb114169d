"""Translates request specs. 0 seconds in a message's objectives stands for no objective."""

from __future__ import annotations

from millrace.core.request import Slo
from millrace.core.request_spec import RequestSpec
from millrace.wire.codec.derive import Codec, derive
from millrace.wire.pb import common_pb2

SLO = derive(Slo, common_pb2.Slo)
SPEC = derive(RequestSpec, common_pb2.RequestSpec, slo=SLO)
#: A spec that stays encoded.
ENCODED = Codec(bytes, common_pb2.RequestSpec.FromString, common_pb2.RequestSpec.SerializeToString)
spec_message, spec_of = SPEC.encode, SPEC.decode


def encode_spec(spec: RequestSpec) -> bytes:
    """Returns the spec as the request store keeps it and as the streams carry it."""
    return spec_message(spec).SerializeToString()


def decode_spec(encoded: bytes) -> RequestSpec:
    return spec_of(common_pb2.RequestSpec.FromString(encoded))
