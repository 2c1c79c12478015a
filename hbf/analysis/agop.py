"""The average gradient outer product (AGOP) of stage 2's inputs, and the matrices that it should resemble.

Let x be a token at the input of stage 2, after the LayerNorm, and f_k the logits. The AGOP of a block is

    G = mean over images, tokens and logits of (∂f_k/∂x) (∂f_k/∂x)ᵀ,        [D, D].

The gradient goes through this stage 2 and the later blocks, but not through the residual connection around this
stage 2. G says which directions of x matter to the answer.

Radhakrishnan et al. 2024 ("Mechanism for feature learning in neural networks and backpropagation-free machine
learning models") found that in trained MLPs the matrix W₁W₁ᵀ of a layer's weights W₁ [D, units] is nearly
proportional to G or its root. In a kernel machine they set the learned metric WᵀW to G. HyperBF has such a metric.
If the metric is the identity, the centers T [A, D] carry the scales of directions, and TᵀT takes the place of
W₁W₁ᵀ.
"""

import functools
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from hbf.models.build import unrolled
from hbf.models.classifier import ImageClassifier
from hbf.models.flops import count_flops


def agop(model: ImageClassifier, params: Any, images: np.ndarray, batch: int = 50) -> dict[str, np.ndarray]:
  """Return the AGOP of each block, float64 [D, D], by the name of the block.

  Args:
    model: the network. Each of its blocks must have a stage 2.
    params: its parameters.
    images: normalized images, [n, height, width, channels].
    batch: number of images that are computed at once.
  """
  sums: dict[str, np.ndarray] = {}
  tokens: dict[str, int] = {}
  for start in range(0, len(images), batch):
    found = _outer_products(model, params, images[start : start + batch])
    for block, (outer, count) in found.items():
      sums[block] = sums.get(block, 0) + np.asarray(outer, np.float64)
      tokens[block] = tokens.get(block, 0) + int(count)
  return {block: total / (tokens[block] * model.classes) for block, total in sums.items()}


def agop_operations(model: ImageClassifier, params: Any, image: tuple[int, ...]) -> int:
  """Return the number of floating-point operations of `agop` for one image of shape (height, width, channels)."""
  example = jax.ShapeDtypeStruct((1, *image), jnp.float32)
  return count_flops(functools.partial(_outer_products, model), params, example)


@functools.partial(jax.jit, static_argnums=0)
def _outer_products(model: ImageClassifier, params: Any, images: jax.Array) -> dict[str, tuple[jax.Array, int]]:
  """Return for each block the sum of the gradients' outer products, [D, D], and the number of tokens of all images.

  The sum is over images, tokens and logits.
  """
  shapes: dict[str, tuple[int, ...]] = {}

  def logits(shifts: Mapping[str, jax.Array]) -> jax.Array:
    def intercept(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
      path = context.module.path
      if context.method_name != '__call__' or path[1:] != ('stage2',):
        return call(*args, **kwargs)
      shapes[path[0]] = args[0].shape
      return call(args[0] + shifts.get(path[0], 0), *args[1:], **kwargs)

    with nn.intercept_methods(intercept):
      return jnp.asarray(unrolled(model).apply({'params': params}, images, train=False))

  jax.eval_shape(logits, {})
  _, pull = jax.vjp(logits, {block: jnp.zeros(shape, images.dtype) for block, shape in shapes.items()})

  def of_logit(row: jax.Array) -> dict[str, jax.Array]:
    (gradients,) = pull(jnp.broadcast_to(row, (len(images), len(row))))
    return {block: jnp.einsum('bnd,bne->de', z, z) for block, z in gradients.items()}

  sums = jax.lax.map(of_logit, jnp.eye(model.classes, dtype=images.dtype))
  return {block: (z.sum(axis=0), shapes[block][0] * shapes[block][1]) for block, z in sums.items()}


def root(matrix: np.ndarray) -> np.ndarray:
  """Return the symmetric square root of a matrix without negative eigenvalues."""
  values, vectors = np.linalg.eigh(matrix)
  return (vectors * np.sqrt(np.maximum(values, 0))) @ vectors.T


def feature_matrices(stage: Mapping[str, Any], metric: str = '') -> dict[str, np.ndarray]:
  """Return the matrices [D, D] of a stage 2 that its AGOP should resemble, by name.

  Args:
    stage: the parameters of HyperBF centers or of an MLP. With several heads, a matrix is block-diagonal, with a
      block for each head.
    metric: the name of the metric of HyperBF centers (`hbf.ops.distances`).

  Returns:
    - 'metric': WᵀW, or the symmetric part of M for metric bilinear. It is missing for metric identity.
    - 'centers': TᵀT. The rows of T [A, D] are the centers t_a.
    - 'slopes': UᵀU. The rows of U [A, D] are the vectors u_a of linear coefficients (u_a·x + w_a) c_a.
    - 'centers and slopes': SᵀS + UᵀU. The rows of S [A, D] are t_a/σ_a². For metric identity, t_a/σ_a² is the part
      of the gradient of −s_a that does not depend on x. The gradient of u_a·x + w_a is u_a, a row of U.
    - 'weights': W₁W₁ᵀ for the first layer of an MLP. In a gated MLP, W₁ has the weights of gates and values.
  """
  if 'hidden' in stage:
    weights = np.asarray(stage['hidden']['kernel'], np.float64)
    return {'weights': weights @ weights.T}
  found = {}
  if 'metric' in stage:
    weights, dimensions = np.asarray(stage['metric'], np.float64), np.shape(stage['centers'])[-1]
    found['metric'] = _by_head(_metric(weights, dimensions, metric == 'bilinear'))
  for name in ('centers', 'slopes'):
    if name in stage:
      rows = np.asarray(stage[name], np.float64)
      found[name] = _by_head(rows.swapaxes(1, 2) @ rows)
  if {'centers', 'slopes', 'log_sigma'} <= set(stage):
    scales = np.exp(-2 * np.asarray(stage['log_sigma'], np.float64)).swapaxes(1, 2)  # 1/σ², [H or 1, A or 1, 1]
    rows = np.asarray(stage['centers'], np.float64) * scales
    found['centers and slopes'] = _by_head(rows.swapaxes(1, 2) @ rows) + found['slopes']
  return found


def _metric(weights: np.ndarray, dimensions: int, bilinear: bool) -> np.ndarray:
  """Return the matrices WᵀW [H, d, d] of the H heads, where d is `dimensions`.

  `weights` is W for each head: [H, d] for a diagonal metric, else [H, rank, d]. If the metric is bilinear, it is M,
  and the result is its symmetric part.
  """
  if bilinear:
    return (weights + weights.swapaxes(1, 2)) / 2
  rows = weights[:, :, None] * np.eye(dimensions) if weights.ndim == 2 else weights
  return rows.swapaxes(1, 2) @ rows


def _by_head(blocks: np.ndarray) -> np.ndarray:
  heads, size, _ = blocks.shape
  return np.einsum('hg,hij->higj', np.eye(heads), blocks).reshape(heads * size, heads * size)


def correlations(left: np.ndarray, right: np.ndarray) -> dict[str, float]:
  """Return Pearson's correlation of the entries of two symmetric matrices.

  Returns:
    'all': over all entries, as in Radhakrishnan et al. 2024. 'diagonal': over the diagonal. 'off_diagonal': over the
    other entries. A correlation is missing if one of the matrices has the same number in all of these entries.
  """
  diagonal = np.eye(len(left), dtype=bool)
  parts = {'all': np.ones_like(diagonal), 'diagonal': diagonal, 'off_diagonal': ~diagonal}
  found = {}
  for name, part in parts.items():
    x, y = left[part], right[part]
    if x.std() > 1e-12 * np.abs(left).max() and y.std() > 1e-12 * np.abs(right).max():
      found[name] = float(np.corrcoef(x, y)[0, 1])
  return found


def random_correlations(matrix: np.ndarray, units: int, draws: int, seed: int) -> dict[str, np.ndarray]:
  """Return the correlations of a matrix [D, D] with random matrices WᵀW, where W [units, D] has normal entries.

  They show how great the correlations become by chance. The result has the keys of `correlations`. Each value is an
  array [draws].
  """
  random = np.random.default_rng(seed)
  found = []
  for _ in range(draws):
    rows = random.normal(size=(units, len(matrix)))
    found.append(correlations(matrix, rows.T @ rows))
  return {name: np.array([each[name] for each in found]) for name in found[0]}
