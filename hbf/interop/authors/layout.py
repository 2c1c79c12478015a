"""Tensors in the state_dicts of the authors' code, in all its versions, and the parameters that are made from them.

The source file is main.py of github.com/sunrainyg/Unified_architecture, at its commits of 2023-09-08 to 2023-10-31.

The authors' code                                 This project
attn: softmax(−scale · (q − k)ᵀM(q − k)), one M   HyperBFAttention, metric bilinear, sigma_per layer: σ² = 1/(2 scale)
mlp: Σ exp(−β (x − t)ᵀM(x − t)) c [+ b]           HyperBFCenters, signed_gaussian, bilinear, normalization none
ViT's attn: softmax(d^−0.8 · q·k)                 SoftmaxAttention has d^−0.5; its queries are scaled by d^−0.3

M is any learned matrix. In this module, the distance of x and t is xᵀMx + tᵀMt − 2xᵀMt.
"""

from collections.abc import Collection

import numpy as np

from hbf.errors import UserError
from hbf.interop.pytorch import VIT, linear, norm
from hbf.interop.table import ParameterSource, Shape, Table, Tensors

ORIGINS = {'hyperbf': "the authors' Hyper_ViT", 'vit': "the authors' ViT"}
# Tensors that only some versions have. A version has such a tensor in all blocks or in none.
_OPTIONAL = ('attn.scale', 'mlp.M_RBF', 'mlp.fc.bias')
_VIT_M, _VIT_HEADS = 192, 4  # the code's constants
_M: dict[str, Shape] = {'attn.M': ('d', 'd')}
_QKV: dict[str, Shape] = {'attn.qkv.weight': ('3D', 'D')}
_CENTERS: dict[str, Shape] = {'mlp.centers': ('hidden', 'D')}
_BLOCK = {
  **norm('norm_stage1', 'norm1'),
  **linear('stage1/out', 'attn.proj', 'D', 'D'),
  **norm('norm_stage2', 'norm2'),
}


def table_of(tensors: Tensors, heads: int | None) -> Table:
  """Return the table for these tensors (`hbf.interop.table`). `heads` is the argument `given` of `heads_of`."""
  if any(name.endswith('.mlp.fc1.weight') for name in tensors):
    return _vit(heads)
  return _hyper_vit([name for name in _OPTIONAL if any(t.endswith(f'.{name}') for t in tensors)])


def heads_of(model: str, width: int, d: int, given: int | None) -> int:
  """Return the number of heads of the attention.

  Args:
    model: 'hyperbf' (Hyper_ViT) or 'vit' (ViT).
    width: D, the dimensions of a token.
    d: number of rows (and of columns) of attn.M.
    given: the number of heads, or None. For Hyper_ViT the number is always width / d, because d is the number of
      dimensions of a head. For ViT the tensors do not show it. By default the authors' ViT has 4 heads and an unused
      M with d = 192. So for ViT, None means 4 if d is 192, else width / d.

  Raises:
    UserError: M and the width do not fit this number of heads.
  """
  default = _VIT_HEADS if (model, d) == ('vit', _VIT_M) else width // max(d, 1)
  heads = default if given is None or model == 'hyperbf' else given
  if heads < 1 or width % heads or (model == 'hyperbf' and (heads * d != width or given not in (None, heads))):
    suffix = '' if given is None else f' with {given} heads'
    raise UserError(f'attn.M is {d}×{d}, which does not fit a width of {width}{suffix}')
  return heads


def scaled_queries(kernel: np.ndarray, factor: float) -> np.ndarray:
  """Return the kernel [D, 3D] that makes queries, keys and values, with its queries multiplied by `factor`."""
  return kernel * np.repeat([factor, 1.0, 1.0], len(kernel))


def _vit(heads: int | None) -> Table:
  def qkv(weight: np.ndarray, m: np.ndarray) -> np.ndarray:
    width = weight.shape[1]
    return scaled_queries(weight.T, (width // heads_of('vit', width, len(m), heads)) ** -0.3)

  block = {
    **_BLOCK,
    'stage1/qkv/kernel': ParameterSource(_QKV | _M, qkv),  # only the size of M is used
    **linear('stage2/hidden', 'mlp.fc1', 'D', 'hidden'),
    **linear('stage2/out', 'mlp.fc2', 'hidden', 'D'),
  }
  return Table(ORIGINS['vit'], VIT, block, 'blocks.{}.')


def _hyper_vit(optional: Collection[str]) -> Table:
  """Return the table of a Hyper_ViT, the authors' HyperBF network, that has the optional tensors `optional`.

  A missing M_RBF is taken as the identity, a missing bias as 0, and a missing scale as d^−0.5 for heads of d
  dimensions.
  """
  scale: dict[str, Shape] = {'attn.scale': ()} if 'attn.scale' in optional else {}
  metric = ParameterSource({'mlp.M_RBF': ('D', 'D')}, lambda m: m[None])
  bias = ParameterSource({'mlp.fc.bias': ('D',)})
  block = {
    **_BLOCK,
    'stage1/qkv/kernel': ParameterSource(_QKV, np.transpose),
    'stage1/metric': ParameterSource(_M | _QKV | scale, _attention_metric),
    'stage1/log_sigma': ParameterSource(_M | scale, _attention_log_sigma),
    'stage2/centers': ParameterSource(_CENTERS, lambda t: t[None]),
    'stage2/metric': metric
    if 'mlp.M_RBF' in optional
    else ParameterSource(_CENTERS, lambda t: np.eye(t.shape[1])[None]),
    'stage2/beta': ParameterSource({'mlp.beta': ('hidden',)}, lambda beta: beta[None, None]),
    'stage2/log_gain': ParameterSource({}, lambda: np.zeros((1, 1, 1))),
    'stage2/coefficients': ParameterSource({'mlp.fc.weight': ('D', 'hidden')}, lambda c: c.T[None]),
    'stage2/bias': bias if 'mlp.fc.bias' in optional else ParameterSource(_CENTERS, lambda t: np.zeros(t.shape[1])),
  }
  return Table(ORIGINS['hyperbf'], VIT, block, 'blocks.{}.')


def _attention_metric(m: np.ndarray, qkv: np.ndarray, scale: float = 1.0) -> np.ndarray:
  """Return our M for each head, [H, d, d]: the authors' matrix `m` [d, d] times the sign of their scale.

  The authors' scale may be negative, and our σ² may not. So the sign goes into M, which may be indefinite. The kernel
  `qkv` [3D, D] shows the number of heads, H = D/d.
  """
  return np.tile(np.sign(scale) * m, (heads_of('hyperbf', qkv.shape[1], len(m), None), 1, 1))


def _attention_log_sigma(m: np.ndarray, scale: np.ndarray | None = None) -> np.ndarray:
  """Return log σ as an array [1, 1, 1], where 1/2σ² is the absolute value of the scale of the authors' attention.

  Args:
    m: the authors' matrix M, [d, d], where d is the width of a head.
    scale: the learned scale. None: the first version of the code, whose scale is d^−0.5 and not learned.
  """
  size = len(m) ** -0.5 if scale is None else abs(float(scale)) or 1.0
  return np.full((1, 1, 1), -0.5 * np.log(2 * size))
