"""Products, convolutions, attention and transforms with the options that models give them."""

from __future__ import annotations

import math
from typing import Any, Final

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name

from anydevice_conformance.dice import Dice
from anydevice_conformance.programs_of_operators import program
from anydevice_conformance.usual_operator import (
    NUMBERS,
    WIDE_FLOATS,
    numbers,
    of_shapes,
)

__all__ = ["PRODUCTS"]

_TAILS: Final = (1, 31, 33, 63, 65, 127, 129)


def _tiles(dice: Dice, dtype: torch.dtype) -> list[Any]:
    """Matrices whose sides are next to those of tiles."""
    m, k, n = dice.among(*_TAILS), dice.among(*_TAILS), dice.among(*_TAILS[:5])
    sizes = (m, k), (k, n), (m, n)
    return [numbers(dice, dtype, *size, low=-2, high=2) for size in sizes]


def _long(dice: Dice, dtype: torch.dtype) -> list[Any]:
    """A long inner side, and many rows: above what 16 bits count."""
    k = 33_001
    sizes = (16, k), (k, 17), (66_001, 2), (2, 1)
    return [numbers(dice, dtype, *size, low=-2, high=2) for size in sizes]


def _without_input(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> Any:
    """With beta=0 the input counts for nothing, whatever is in it."""
    bad = torch.full_like(z, math.nan)
    return (
        torch.addmm(bad, x, y, beta=0),
        torch.baddbmm(bad[None], x[None], y[None], beta=0, alpha=2),
        torch.addmv(bad[:, 0], x, y[:, 0], beta=0),
    )


def _heads(dice: Dice, dtype: torch.dtype) -> list[Any]:
    """Queries, keys, values of two heads and of one, of widths that models have."""
    q, k = dice.among(1, 5, 33, 64), dice.among(33, 65, 130)
    width = dice.among(32, 64, 80, 96, 128)
    sizes = (2, 2, q, width), (2, 2, k, width), (2, 2, k, width), (2, 1, k, width)
    return [numbers(dice, dtype, *size, low=-1.5, high=1.5) for size in sizes]


def _sdpa(*arguments: Any, **options: Any) -> torch.Tensor:
    return F.scaled_dot_product_attention(*arguments, **options)


def _padding(q: torch.Tensor, k: torch.Tensor, least: bool) -> torch.Tensor:
    """What transformers make of padding: other keys for each sample, as numbers or bools."""
    kept = torch.arange(k.shape[-2], device=q.device) < torch.tensor(
        [[k.shape[-2] - 2], [k.shape[-2] // 2]], device=q.device
    )
    mask = kept[:, None, None, :].expand(2, 1, q.shape[-2], -1)
    if not least:
        return mask
    return torch.zeros_like(mask, dtype=q.dtype).masked_fill(~mask, torch.finfo(q.dtype).min)


def _window(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """A sliding window whose end is that of the keys."""
    i = torch.arange(q.shape[-2], device=q.device)[:, None] + k.shape[-2] - q.shape[-2]
    j = torch.arange(k.shape[-2], device=q.device)
    return ((j <= i) & (j > i - 16)) | (j == 0)


def _grouped(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, few: torch.Tensor) -> torch.Tensor:
    return _sdpa(q, few, few * 0.5, enable_gqa=True)


def _turned(x: torch.Tensor) -> torch.Tensor:
    """Rotary embedding, by halves and by pairs."""
    half = x.shape[-1] // 2
    rates = torch.arange(half, device=x.device, dtype=torch.float32) / half
    angles = torch.arange(x.shape[-2], device=x.device)[:, None] * (10_000.0**-rates)
    cos, sin = (torch.cat([f(angles)] * 2, -1).to(x.dtype) for f in (torch.cos, torch.sin))
    pairs = torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin + pairs * sin


def _recurrent(kind: str, layers: int, both: bool) -> Any:
    """Cells of 7 units over sequences, with weights that come of the input."""
    gates = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}[kind]

    def run(x: torch.Tensor, w: torch.Tensor) -> Any:
        found: list[torch.Tensor] = []
        for layer in range(layers):
            for _ in range(1 + both):
                wide = 5 if layer == 0 else 7 * (1 + both)
                found += [w[: 7 * gates, :wide], w[: 7 * gates, 2:9]]
                found += [w[: 7 * gates, 0], w[: 7 * gates, 1]]
        start = x.new_full((layers * (1 + both), x.shape[0], 7), 0.5)
        state: Any = (start, start * 2) if kind == "lstm" else start
        call = getattr(torch, kind)
        return call(
            x, state, [one.contiguous() for one in found], True, layers, 0.0, False, both, True
        )

    return run


def _spectra(x: torch.Tensor) -> Any:
    window = torch.hann_window(16, dtype=x.dtype, device=x.device)
    parts = torch.stft(x, 16, 5, window=window, return_complex=True)
    back = torch.istft(parts, 16, 5, window=window, length=x.shape[-1])
    return torch.view_as_real(parts), back


_real = torch.view_as_real

#: Products.
PRODUCTS: Final = (
    program(
        "products mm of tiles",
        _tiles,
        lambda x, y, z: x @ y,
        lambda x, y, z: F.linear(x, y.mT, z[0]),
        lambda x, y, z: torch.addmm(z, x, y, beta=0.5, alpha=-2),
        lambda x, y, z: torch.bmm(x.expand(3, -1, -1), y.expand(3, -1, -1)),
        lambda x, y, z: (x[0] @ y, x @ y[:, 0], x[0] @ y[:, 0]),
        lambda x, y, z: x.mT @ z,
        lambda x, y, z: F.linear(x[None, None], y.mT),
        lambda x, y, z: x[:, :0] @ y[:0],
        lambda x, y, z: torch.linalg.multi_dot([x, y, z.mT]) / x.shape[-1],
        dtypes=(*NUMBERS[:4], torch.int64, torch.int32),
    ),
    program(
        "products mm of broadcast batches",
        of_shapes((5, 1, 3, 7), (2, 7, 4), (4, 7)),
        lambda x, y, z: x @ y,
        lambda x, y, z: x[:, 0] @ z.mT,
        lambda x, y, z: torch.einsum("bhqd,hdk->bqhk", x.expand(-1, 2, -1, -1), y),
        lambda x, y, z: torch.einsum("...id,kd->...ik", x, z),
        lambda x, y, z: torch.einsum("ij,ij->j", z, z),
        lambda x, y, z: torch.tensordot(x, y, ([-1], [1])),
        lambda x, y, z: (torch.kron(z[:2], z[:, :2]), torch.outer(z[0], z[:, 1])),
        lambda x, y, z: torch.addbmm(z[:, :4], y.mT, y, beta=2),
    ),
    program("products mm without input", _tiles, _without_input, trained=False),
    program(
        "products mm of long sides",
        _long,
        lambda x, y, z, w: x @ y,
        lambda x, y, z, w: z @ w,
        lambda x, y, z, w: torch.addmm(y[:17, 0], x[:, -4097:], y[-4097:]),
        trained=False,
    ),
    program(
        "conv2d with options",
        of_shapes((2, 6, 9, 11), (6, 6, 3, 3), (6,), (12, 1, 3, 5)),
        lambda x, w, b, d: F.conv2d(x, w, b, 2, 1),
        lambda x, w, b, d: F.conv2d(x, w, None, padding="same", dilation=2),
        lambda x, w, b, d: F.conv2d(x, w[:, :2], b, (1, 2), (2, 0), (1, 2), 3),
        lambda x, w, b, d: F.conv2d(x, w[:, :, :1, :1], b),
        lambda x, w, b, d: F.conv2d(x, d, None, 1, (1, 2), 1, 6),
        lambda x, w, b, d: F.conv2d(F.pad(x, (1, 1, 2, 1), mode="reflect"), w, b),
        lambda x, w, b, d: F.conv2d(x[0], w, b, 3),
        lambda x, w, b, d: F.conv2d(x, w[:, :, :, :1], b, (1, 3), (1, 0)),
        lambda x, w, b, d: F.conv2d(x[:, :1], w[:, :1], b, 1, 1),
    ),
    program(
        "conv transposes with options",
        of_shapes((2, 4, 5, 6), (4, 6, 3, 2), (6,)),
        lambda x, w, b: F.conv_transpose2d(x, w, b, 2, 1, 1),
        lambda x, w, b: F.conv_transpose2d(x, w, None, (1, 3), 0, (0, 2), 1, 1),
        lambda x, w, b: F.conv_transpose2d(x, w[:, :3], b, 1, 1, 0, 2, 2),
        lambda x, w, b: F.conv_transpose1d(x[:, :, 0], w[..., 0], b, 3, 1, 2),
        lambda x, w, b: F.conv_transpose3d(x[:, :, None], w[:, :, None], b, 2, 0, 1),
    ),
    program(
        "conv1d and conv3d with options",
        of_shapes((2, 4, 67), (6, 2, 5), (6,), (1, 2, 5, 6, 7), (4, 2, 3, 2, 3)),
        lambda x, w, b, y, k: F.conv1d(x, w, b, 3, 2, 2, 2),
        lambda x, w, b, y, k: F.conv1d(x, w[:4, :1], None, 1, "same", 1, 4),
        lambda x, w, b, y, k: F.conv1d(F.pad(x, (4, 0)), w, b, 1, 0, 1, 2),
        lambda x, w, b, y, k: F.conv1d(x, w[:, :, :1].repeat(1, 2, 1), b),
        lambda x, w, b, y, k: F.conv3d(y, k, b[:4], (1, 2, 2), 1),
        lambda x, w, b, y, k: F.conv3d(y, k[:, :1], None, 1, (0, 1, 0), (2, 1, 1), 2),
    ),
    program(
        "conv1d of long samples",
        of_shapes((1, 2, 66_001), (3, 2, 5)),
        lambda x, w: F.conv1d(x, w, None, 2, 2),
        lambda x, w: F.conv1d(x, w[:2, :1], None, 1, 4, 2, 2),
        slow=True,
    ),
    program(
        "attention with options",
        _heads,
        lambda q, k, v, few: _sdpa(q, k, v),
        lambda q, k, v, few: _sdpa(q, k, v, is_causal=True),
        lambda q, k, v, few: _sdpa(q, k, v, _padding(q, k, least=False)),
        lambda q, k, v, few: _sdpa(q, k, v, _padding(q, k, least=True)),
        lambda q, k, v, few: _sdpa(q, k, v, _window(q, k)),
        lambda q, k, v, few: _sdpa(q, k, v, scale=0.3),
        _grouped,
        lambda q, k, v, few: _sdpa(q, k[:1, :1], v[:1, :1]),
        lambda q, k, v, few: _sdpa(q[0], k[0], v[0, ..., :24]),
        lambda q, k, v, few: _sdpa(k, k, v, is_causal=True),
        lambda q, k, v, few: ((q * 0.1) @ k.mT).softmax(-1) @ v,
        lambda q, k, v, few: _turned(q),
    ),
    program(
        "recurrent layers: lstm, gru, rnn",
        of_shapes((3, 6, 5), (28, 14)),
        _recurrent("lstm", 2, both=True),
        _recurrent("gru", 1, both=True),
        _recurrent("gru", 2, both=False),
        _recurrent("rnn_tanh", 2, both=True),
        _recurrent("rnn_relu", 1, both=False),
        dtypes=WIDE_FLOATS,
        slow=True,
    ),
    program(
        "fft with options",
        of_shapes((2, 7, 12), (2, 400)),
        lambda x, y: _real(torch.fft.fft(x, 9, -1, "ortho")),
        lambda x, y: _real(torch.fft.rfft2(x)),
        lambda x, y: _real(torch.fft.rfft(x, 16, 1, "forward")),
        lambda x, y: torch.fft.irfft(torch.fft.rfft(y), 400),
        lambda x, y: torch.fft.irfft2(torch.fft.rfft2(x), s=(7, 12), norm="ortho"),
        lambda x, y: _real(torch.fft.ifftn(torch.fft.fftn(x) * 2, dim=(0, 2))),
        lambda x, y: (torch.fft.fftshift(x), torch.fft.ifftshift(x, 1)),
        lambda x, y: _spectra(y),
        dtypes=WIDE_FLOATS,
    ),
)
