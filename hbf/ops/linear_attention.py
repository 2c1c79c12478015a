"""Linear attention: weights φ(q)·φ(k) from features φ, at a cost of O(N) for N tokens (Katharopoulos et al. 2020).

The feature map φ defines the similarity of a query and a key. Random features approximate softmax attention, or stage
1 of a HyperBF block. If the normalizer makes the weights sum to 1, this is eq. 2 of CBMM Memo 143 with a kernel of
finite rank.

In this module, "float32" means float64 if an input is float64 (`hbf.ops.products.sum_dtype`).
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float

from hbf.errors import UserError, choose
from hbf.ops.layout import explicit_split, laid_out_by_xla, vary_together
from hbf.ops.products import products, row_dots, sum_dtype

CHUNK = 128  # tokens in a chunk, see `_causal_sums`
# Added to each sum of weights, because a query may be similar to no key. The gradient contains the inverse square of
# this number, so the number must not be below 1e-18.
_EPSILON = 1e-12
_UNSEEN = -1e30  # log-scale of a hidden key, never the largest. It is not −∞, because −∞ − (−∞) is NaN.


class Features(NamedTuple):
  """Features φ = values · exp(log_scale).

  Exponential features are scaled so that the largest value of each token is 1. Otherwise they could overflow.

  Attributes:
    values: numbers of 0 or more, [..., N, m] in the type of the points.
    log_scale: float32 [..., N, 1], the largest exponent of each token, or 0 if features are not exponentials. It is
      subtracted from the exponents of the values. So φ does not depend on it, and its gradient is set to 0.
  """

  values: jax.Array
  log_scale: jax.Array


class State(NamedTuple):
  """Sums over the keys so far. Their size does not depend on the number of keys.

  Attributes:
    sums: Σ_j φ(k_j) (v_j, 1)ᵀ exp(−log_peak), float32 [..., m, V + 1].
    log_peak: the largest `Features.log_scale` of the keys so far, float32 [..., 1, 1].
  """

  sums: jax.Array
  log_peak: jax.Array


def feature_map(
  points: Float[Array, '... N D'],
  name: str,
  *,
  projections: Float[Array, '... m D'] | None = None,
  sigma: Float[Array, '...'] | float = 1.0,
) -> Features:
  """Compute the features φ(x) of queries or keys.

  Args:
    points: x [..., N, D].
    name: name of the map. 'elu' (elu(x) + 1, Katharopoulos et al. 2020, eq. 7), 'relu' and 'exp' work element by
      element. 'softmax' and 'gaussian' are random, positive maps (Choromanski et al. 2021, lemma 1). The expected
      value of φ(q)·φ(k) is exp(q·k/√D) for 'softmax', and exp(−‖q − k‖²/2σ²) for 'gaussian'.
    projections: ω [..., m, D] of the random maps, see `orthogonal_projections`. Other maps do not use it.
    sigma: σ of 'gaussian', broadcastable to [..., 1, 1]. Other maps do not use it.

  Returns:
    The m features of every point. Maps that are not random have m = D.

  Raises:
    UserError: the map is unknown.
  """
  return choose('features', name, MAPS)(points, projections, sigma)


def orthogonal_projections(rng: np.random.Generator, count: int, d: int) -> np.ndarray:
  """Draw rows ω from a normal distribution, in groups of d orthogonal rows (Choromanski et al. 2021, section 2.4).

  Each row alone has the distribution N(0, I), like independent rows. So φ(q)·φ(k) has the same expected value as with
  independent rows. It varies less, because the rows are orthogonal.

  Returns:
    float32 [count, d].
  """
  directions, upper = np.linalg.qr(rng.normal(size=(-(-count // d), d, d)))
  # Without these signs the directions aren't uniform: the QR factorization prefers some directions.
  directions *= np.sign(np.diagonal(upper, axis1=-2, axis2=-1))[:, None, :]
  norms = np.sqrt(rng.chisquare(d, size=(count, 1)))
  return (norms * directions.reshape(-1, d)[:count]).astype(np.float32)


def keep_visible(keys: Features, seen: Bool[Array, '... N 1']) -> Features:
  """Return the features of keys, with zeros for the keys where `seen` is False.

  `seen` holds booleans broadcastable to [..., N, 1].
  """
  return Features(jnp.where(seen, keys.values, 0), jnp.where(seen, keys.log_scale, _UNSEEN))


def linear_attention(
  queries: Features, keys: Features, values: Float[Array, '... M V'], *, normalizer: str, causal: bool
) -> Float[Array, '... N V']:
  """Compute y_i = Σ_j φ(q_i)·φ(k_j) v_j in time and memory O(N m V), and normalize it.

  Args:
    queries: φ(q), [..., N, m].
    keys: φ(k), [..., M, m].
    values: v [..., M, V], with the leading axes of the features.
    normalizer: 'sum' divides y_i by Σ_j φ(q_i)·φ(k_j) (CBMM Memo 143, eq. 2). 'none' does not divide. Except with the
      feature maps 'elu' and 'relu', each y_i is then known only up to a positive factor. So the caller should
      normalize the rows of the result (TransNormer, Qin et al. 2022).
    causal: True to sum over j ≤ i only.

  Returns:
    [..., N, V] in the type of the values.

  Raises:
    UserError: the normalizer is unknown, or attention is causal with unequal numbers of queries and keys.
  """
  if causal:
    start = no_state(keys.values, values)
    return continued_linear_attention(queries, keys, values, start, normalizer=normalizer)[0]
  finish = choose('normalizer', normalizer, NORMALIZERS)
  # A common factor of all weights of a query cancels in the quotient, and in normalized rows. So the scale of the
  # query is dropped, and the scales of the keys are relative to the largest in the sum.
  return finish(_all_sums(queries.values, keys, _with_ones(values))).astype(values.dtype)


def no_state(features: Float[Array, '... N m'], values: Float[Array, '... N V']) -> State:
  """Return the state before any key, for features [..., N, m] and values [..., N, V]."""
  leading, m, columns = values.shape[:-2], features.shape[-1], values.shape[-1] + 1
  dtype = sum_dtype(features.dtype, values.dtype)
  return State(jnp.zeros((*leading, m, columns), dtype), jnp.full((*leading, 1, 1), -jnp.inf, dtype))


def continued_linear_attention(
  queries: Features, keys: Features, values: Float[Array, '... N V'], state: State, *, normalizer: str
) -> tuple[Float[Array, '... N V'], State]:
  """Compute causal `linear_attention` of new tokens after earlier tokens, whose sums are in `state`.

  Return the outputs, and the state after the new tokens.
  """
  finish = choose('normalizer', normalizer, NORMALIZERS)
  split = PartitionSpec(*explicit_split(values)[:-2])
  sums, state = laid_out_by_xla(_causal_sums, split, queries.values, keys, _with_ones(values), state)
  return finish(sums).astype(values.dtype), state


def _with_ones(values: jax.Array) -> jax.Array:
  return jnp.concatenate([values, jnp.ones_like(values[..., :1])], axis=-1)


def _elu(points: jax.Array, projections: jax.Array | None, sigma: jax.Array | float) -> Features:
  return _unscaled(points, jax.nn.elu(points.astype(sum_dtype(points.dtype))) + 1)


def _relu(points: jax.Array, projections: jax.Array | None, sigma: jax.Array | float) -> Features:
  return _unscaled(points, jax.nn.relu(points))


def _exp(points: jax.Array, projections: jax.Array | None, sigma: jax.Array | float) -> Features:
  return _from_exponents(points, points.astype(sum_dtype(points.dtype)))


def _softmax(points: jax.Array, projections: jax.Array | None, sigma: jax.Array | float) -> Features:
  """Compute exp(ω·z − ‖z‖²/2)/√m with z = x/D^¼."""
  return _random(points, projections, points.shape[-1] ** 0.25, 0.5)


def _gaussian(points: jax.Array, projections: jax.Array | None, sigma: jax.Array | float) -> Features:
  """Compute exp(ω·z − ‖z‖²)/√m with z = x/σ."""
  return _random(points, projections, sigma, 1.0)


def _random(
  points: jax.Array, projections: jax.Array | None, sigma: jax.Array | float, norm_factor: float
) -> Features:
  assert projections is not None
  scaled = points.astype(sum_dtype(points.dtype)) / sigma
  exponents = products(scaled, projections) - norm_factor * row_dots(scaled, scaled)
  return _from_exponents(points, exponents - 0.5 * math.log(projections.shape[-2]))


def _unscaled(points: jax.Array, features: jax.Array) -> Features:
  return Features(features.astype(points.dtype), jnp.zeros((*points.shape[:-1], 1), sum_dtype(points.dtype)))


def _from_exponents(points: jax.Array, exponents: jax.Array) -> Features:
  log_scale = jax.lax.stop_gradient(jnp.max(exponents, axis=-1, keepdims=True))
  return Features(jnp.exp(exponents - log_scale).astype(points.dtype), log_scale)


Map = Callable[[jax.Array, jax.Array | None, jax.Array | float], Features]
RANDOM_MAPS: dict[str, Map] = {'softmax': _softmax, 'gaussian': _gaussian}
MAPS: dict[str, Map] = {'elu': _elu, 'relu': _relu, 'exp': _exp, **RANDOM_MAPS}


def _all_sums(queries: jax.Array, keys: Features, values: jax.Array) -> jax.Array:
  """Compute the sums Σ_j φ(q_i)·φ(k_j) v_j [..., N, V] over all keys j, up to a positive factor for each i."""
  weights = jnp.exp(keys.log_scale - jnp.max(keys.log_scale, axis=-2, keepdims=True))
  return _product('...nm,...mv->...nv', queries, _state(keys.values, weights, values))


def _causal_sums(queries: jax.Array, keys: Features, values: jax.Array, state: State) -> tuple[jax.Array, State]:
  """Compute the sums Σ_j≤i φ(q_i)·φ(k_j) v_j [..., N, V], up to a positive factor for each i.

  The sums include the earlier keys, whose sums are in `state`. Return the sums, and the state after the last token.
  """
  # Tokens are processed in chunks. The keys of earlier chunks are summed in one matrix, the state. Within a chunk,
  # weights are computed for each pair of tokens. The sum for i is divided by the largest scale of the keys up to i.
  # With the largest scale of all keys, a later key could make the sum for i underflow.
  if queries.shape[-2] != values.shape[-2]:
    raise UserError(f'causal attention needs a key a query: {queries.shape[-2]} queries have {values.shape[-2]} keys')
  queries, keys, values, state = vary_together((queries, keys, values, state))
  length = values.shape[-2]
  size = max(1, min(CHUNK, length))
  mask = np.tri(size, dtype=bool)

  def step(carry: State, chunk: tuple[jax.Array, Features, jax.Array]) -> tuple[State, jax.Array]:
    (state, peak), (q, (k, scale), v) = carry, chunk
    peaks = jnp.maximum(peak, jax.lax.cummax(scale, axis=scale.ndim - 2))
    weights = _product('...nm,...jm->...nj', q, k) * jnp.exp(jnp.where(mask, scale.mT - peaks, -jnp.inf))
    sums = _product('...nj,...jv->...nv', weights.astype(v.dtype), v)
    sums += jnp.exp(peak - peaks) * _product('...nm,...mv->...nv', q, state)
    last = peaks[..., -1:, :]
    state = jnp.exp(peak - last) * state + _state(k, jnp.exp(scale - last), v)
    return State(state, last), sums

  leading = values.shape[:-2]
  chunked = Features(_chunks(keys.values, size), _chunks(keys.log_scale, size, _UNSEEN))
  state, sums = jax.lax.scan(step, state, (_chunks(queries, size), chunked, _chunks(values, size)))
  padded = len(sums) * size
  return jnp.moveaxis(sums, 0, -3).reshape(*leading, padded, values.shape[-1])[..., :length, :], state


def _chunks(z: jax.Array, size: int, fill: float = 0.0) -> jax.Array:
  """Split rows [..., N, C] into chunks [chunks, ..., size, C] of neighboring rows, padding the last with `fill`."""
  *leading, length, columns = z.shape
  padded = jnp.pad(z, [(0, 0)] * len(leading) + [(0, -length % size), (0, 0)], constant_values=fill)
  return jnp.moveaxis(padded.reshape(*leading, padded.shape[-2] // size, size, columns), -3, 0)


def _state(features: jax.Array, weights: jax.Array, values: jax.Array) -> jax.Array:
  """Compute the sum Σ_j w_j φ_j v_jᵀ [..., m, V] over the keys j, in float32."""
  return _product('...nm,...nv->...mv', features, (weights * values).astype(values.dtype))


def _product(spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
  return jnp.einsum(spec, a, b, preferred_element_type=sum_dtype(a.dtype, b.dtype))


# Functions of sums [..., N, V + 1] whose last column is the sum of the weights.
NORMALIZERS: dict[str, Callable[[jax.Array], jax.Array]] = {
  'sum': lambda sums: sums[..., :-1] / (sums[..., -1:] + _EPSILON),
  'none': lambda sums: sums[..., :-1],
}
