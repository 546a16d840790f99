"""Tensors as bytes, in the codings that `swarm_protocol.pipeline.Part` names.

    int8   x ~ code s / 127 in blocks of 64,   code = round(127 x / s),   s = largest magnitude (bfloat16)

Activations and gradients travel in a codec of the crew's choice; all other tensors are exact.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from swarm_node.averaging.codecs import LARGEST, blocks_of, bounded, dequantise, quantise
from swarm_protocol.errors import LocalProtocolError
from swarm_protocol.pipeline import BLOCK, ActivationCodec, Coding, Part


def encode_tensor(tensor: Tensor, coding: Coding) -> tuple[Part, np.ndarray]:
    """Description and bytes of a tensor. Raises LocalProtocolError for numbers that are not finite or too large."""
    part, flat = Part(coding, tuple(tensor.shape)), tensor.detach().cpu().contiguous().view(-1)
    if coding == "bits":
        return part, np.packbits(flat.numpy())
    if coding == "int32":
        return part, flat.to(torch.int32).numpy()
    if not bounded(flat):
        raise LocalProtocolError("numbers that are not finite, or too large, are not sent")
    if coding == "float32":
        return part, flat.to(torch.float32).numpy()
    if coding == "bfloat16":
        return part, flat.to(torch.bfloat16).view(torch.int16).numpy()
    scale, codes = quantise(blocks_of(flat.float()))
    return part, torch.cat([scale.view(torch.uint8).view(-1), codes.view(torch.uint8).view(-1)]).numpy()


def decode_tensor(part: Part, data: bytearray | memoryview) -> Tensor:
    """The tensor that a part's bytes stand for: float32, int64 or bool. It may be a view of the bytes."""
    n = part.values
    if part.coding == "bits":
        flat = torch.from_numpy(np.unpackbits(np.frombuffer(data, np.uint8), count=n).view(np.bool_))
    elif part.coding == "int32":
        flat = torch.frombuffer(data, dtype=torch.int32, count=n).long()
    elif part.coding == "float32":
        flat = torch.frombuffer(data, dtype=torch.float32, count=n)
    elif part.coding == "bfloat16":
        flat = torch.frombuffer(data, dtype=torch.bfloat16, count=n).float()
    else:
        blocks = -(-n // BLOCK)
        scale = torch.frombuffer(data, dtype=torch.bfloat16, count=blocks)[:, None]
        codes = torch.frombuffer(data, dtype=torch.int8, count=blocks * BLOCK, offset=2 * blocks)
        flat = dequantise(scale, codes.view(-1, BLOCK)).view(-1)[:n]
    return flat.view(part.shape)


def sendable(values: Tensor) -> Tensor:
    """`values`, with zeros in place of those that cannot be sent."""
    return values if bounded(values) else torch.where(values.abs() <= LARGEST, values, 0)


def rounded(values: Tensor, codec: ActivationCodec) -> Tensor:
    """A copy of `values` as the receiver decodes them; encoding the copy changes it no more."""
    if codec == "float32":
        return values.detach().clone()
    part, data = encode_tensor(values, codec)
    return decode_tensor(part, bytearray(data.tobytes())).to(values.device, values.dtype)
