"""HyperBF units: stage 1 over the tokens themselves, stage 2 over learned centres. Both call `hbf.ops.hyperbf`."""

from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from hbf.errors import UserError, choose
from hbf.nn.attention import QK_NORMS, check_heads, project_out, project_qkv, unit
from hbf.nn.parameters import distance_scale, metric_parameter, width_parameter
from hbf.ops.hyperbf import hyperbf, hyperbf_plain, log_responses, normalise
from hbf.ops.kmeans import kmeans, sample
from hbf.ops.nearest import greatest


class HyperBFAttention(nn.Module):
  """Stage 1 (memo eq. 6): y = Σ K(‖W(q − k)‖² / 2σ²) v / Σ K, per head, keys and values computed from the tokens.

  With many memory tokens it is both stages in one: a HyperBF over the tokens and learned centres together (model
  unified). A token costs 8D² + 4(N + m)D operations with metric identity.

  Attributes:
    heads: H; the tokens' width D must be divisible by it. A head works on d = D/H dimensions.
    kernel: a name in `hbf.ops.kernels.KERNELS`.
    metric: of every head, see `hbf.ops.distances`.
    rank: rows of W for metric low_rank, unused by the others.
    width: 'fixed', 'layer' or 'head': what has a learned σ of its own.
    width_scale: at init σ² is this times √d (√rank for low_rank), which keeps q·k/σ² of order 1.
    qk_norm: 'none', or 'unit': queries and keys of norm 1 (and σ² at init this times 1/√d).
    memory: m learned centres a head beside the keys: y = (ΣK v + ΣK c) / (ΣK + ΣK); 0 for none.
    dtype: of the products; parameters are float32.
  """

  heads: int
  kernel: str
  metric: str
  rank: int
  width: str
  width_scale: float
  qk_norm: str
  memory: int
  dtype: Any = jnp.float32
  size: ClassVar[str] = 'memory'  # the option that says how large the stage is

  @nn.compact
  def __call__(self, tokens: jax.Array) -> jax.Array:
    """Maps tokens [B, N, D] to [B, N, D]."""
    if self.width in ('centre', 'signed'):
      raise UserError("stage 1 can't have a width for each centre, its centres are the tokens: use layer or head")
    q, k, v = (z.swapaxes(1, 2) for z in project_qkv(tokens, self.heads, self.dtype))
    k, v = self._remember('memory_centres', k), self._remember('memory_coefficients', v)
    d = q.shape[-1]
    variance = self.width_scale * distance_scale(self.metric, d, self.rank)
    if choose('qk_norm', self.qk_norm, QK_NORMS):
      q, k = unit(q), unit(k)
      variance /= d  # norms are 1 instead of √d
    out = hyperbf(
      q,
      k,
      v,
      kernel=self.kernel,
      width=width_parameter(self, self.width, variance, self.heads),
      metric=self.metric,
      weights=metric_parameter(self, self.metric, self.heads, d, self.rank),
    )
    return project_out(out.swapaxes(1, 2), self.dtype)

  def _remember(self, name: str, z: jax.Array) -> jax.Array:
    """Keys or values [B, H, N, d] followed by the learned ones: [B, H, N + memory, d]."""
    if not self.memory:
      return z
    shape = (z.shape[1], self.memory, z.shape[3])
    learned = self.param(name, nn.initializers.normal(1.0), shape).astype(z.dtype)
    return jnp.concatenate([z, jnp.broadcast_to(learned, z.shape[:1] + shape)], axis=2)


class HyperBFUnit(nn.Module):
  """Stage 2 (memo eq. 7): z = Σ_a R_a(y) c_a + b over learned centres.

  With several heads each is a HyperBF on its own subspace of d = D/H dimensions that writes to all D outputs.
  At init the unit is alive whatever the kernel, metric and width: a gain makes the mean response to the tokens
  seen at initialisation 1 (normalisation none), and coefficients are drawn so that the output's scale is
  `coefficients_scale`. With the collection 'responses' mutable it hands out R, [H, B N, A]. A token costs 4 A D
  operations (with one head and a diagonal metric).

  Attributes:
    centres: A, for every head.
    heads: H; the tokens' width D must be divisible by it. 1 is the memo's unit.
    kernel: a name in `hbf.ops.kernels.KERNELS`.
    metric: of every head, see `hbf.ops.distances`.
    rank: rows of W for metric low_rank, unused by the others.
    width: 'fixed', 'layer', 'head' or 'centre': what has a learned σ of its own; 'signed': every centre has a free
      1/2σ² of any sign, as in the authors' code, which needs kernel gaussian and metric bilinear.
    width_scale: at init σ² is this times √d (√rank for low_rank), which keeps x·t/σ² of order 1.
    normalisation: of the responses over the centres, see `hbf.ops.hyperbf.normalise`.
    centres_init: 'normal', 'tokens' (drawn from those seen at initialisation) or 'kmeans' (of those).
    coefficients_scale: root mean square of the output at init.
    nearest: only so many centres respond to a token, those with the greatest K; 0: all.
    nested: in training all centres respond to one half of the images, and to each of the others a random number of
      the first ones, as often one of 1 to 8 as of 8 to 64: so any number can be taken in the end
      (`hbf.models.nested`; after nested dropout, Rippel et al. 2014). It needs a 'dropout' key in training, and must
      have none otherwise.
    form: how the sums over the centres are computed, see `hbf.ops.hyperbf.hyperbf`.
    dtype: of the products; parameters are float32.
  """

  centres: int
  heads: int
  kernel: str
  metric: str
  rank: int
  width: str
  width_scale: float
  normalisation: str
  centres_init: str
  coefficients_scale: float
  nearest: int
  nested: bool
  form: str
  dtype: Any = jnp.float32
  size: ClassVar[str] = 'centres'  # the option that says how large the stage is

  @nn.compact
  def __call__(self, tokens: jax.Array) -> jax.Array:
    """Maps tokens [B, N, D] to [B, N, D]."""
    width = tokens.shape[-1]
    check_heads(width, self.heads)
    if self.width == 'signed' and (self.kernel, self.metric) != ('gaussian', 'bilinear'):
      raise UserError(f'width signed needs kernel gaussian and metric bilinear, not {self.kernel} and {self.metric}')
    d = width // self.heads
    points = tokens.astype(self.dtype).reshape(-1, self.heads, d).swapaxes(0, 1)  # [H, B N, d]
    init = choose('centres_init', self.centres_init, CENTRES_INITS)
    centres = self.param('centres', init, points, self.centres).astype(points.dtype)
    variance = self.width_scale * distance_scale(self.metric, d, self.rank)
    unit: dict[str, Any] = {
      'kernel': self.kernel,
      'width': width_parameter(self, self.width, variance, self.heads, self.centres),
      'metric': self.metric,
      'weights': metric_parameter(self, self.metric, self.heads, d, self.rank),
    }

    def init_log_gain(_: jax.Array) -> jax.Array:
      log_k = log_responses(points, centres, **unit)
      return jnp.log(log_k[0].size) - jax.nn.logsumexp(log_k, axis=(1, 2), keepdims=True)

    log_gain = self.param('log_gain', init_log_gain) if self.normalisation == 'none' else 0.0
    mask = self._mask(log_responses(points, centres, **unit), len(tokens)) if self.nearest or self.nested else None

    def responses() -> jax.Array:
      return normalise(log_responses(points, centres, **unit), self.normalisation, log_gain, mask)

    def init_coefficients(key: jax.Array) -> jax.Array:
      power = jnp.mean(jnp.sum(responses() ** 2, axis=(0, 2)))
      return jax.random.normal(key, (self.heads, self.centres, width)) * self.coefficients_scale / jnp.sqrt(power)

    coefficients = self.param('coefficients', init_coefficients).astype(points.dtype)
    bias = self.param('bias', nn.initializers.zeros_init(), (width,)).astype(points.dtype)
    if self.is_mutable_collection('responses') and not self.is_initializing():  # for whoever wants to see them
      self.sow('responses', 'responses', responses())
    unit |= {'normalisation': self.normalisation, 'log_gain': log_gain}
    if mask is None:
      out = hyperbf(points, centres, coefficients, **unit, form=self.form)
    else:
      out = hyperbf_plain(points, centres, coefficients, **unit, mask=mask)
    return (out.sum(axis=0) + bias).reshape(tokens.shape)

  def _mask(self, log_k: jax.Array, images: int) -> jax.Array:
    """Which centres respond to which points, from log K [H, B N, A] of B images: booleans that broadcast to it."""
    mask = jnp.ones((1, 1, self.centres), bool)
    if self.nested and self.has_rng('dropout') and not self.is_initializing():
      # From 1/2 to 1 counts as 1, all centres.
      exponent = jnp.minimum(2 * jax.random.uniform(self.make_rng('dropout'), (images, 1)), 1.0)
      mask = jnp.arange(self.centres) < self.centres**exponent
      mask = jnp.repeat(mask, log_k.shape[1] // images, axis=0)
    if self.nearest:
      if not 1 <= self.nearest <= self.centres:
        raise UserError(f'stage2.nearest must be from 1 to the {self.centres} centres, or 0 for all: {self.nearest}')
      mask &= greatest(jnp.where(mask, log_k, -jnp.inf), self.nearest)
    return mask


def _normal(key: jax.Array, points: jax.Array, count: int) -> jax.Array:
  heads, _, d = points.shape
  return jax.random.normal(key, (heads, count, d))


def _per_head(start: Any) -> Any:
  """Lets `start(key, points [N, d], count)` work on points [H, N, d]."""

  def init(key: jax.Array, points: jax.Array, count: int) -> jax.Array:
    keys = jax.random.split(key, len(points))
    return jax.vmap(start, in_axes=(0, 0, None))(keys, points.astype(jnp.float32), count)

  return init


# Where centres start, from points [H, N, d] seen at initialisation: [H, count, d].
CENTRES_INITS = {'normal': _normal, 'tokens': _per_head(sample), 'kmeans': _per_head(kmeans)}
