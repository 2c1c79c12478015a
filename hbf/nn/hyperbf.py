"""HyperBF units: stage 1 over the tokens themselves, stage 2 over learned centers. Both call `hbf.ops.hyperbf`."""

from typing import Annotated, Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from hbf.nn.cache import new_tokens, update_cache
from hbf.nn.checked import CheckedModule
from hbf.nn.context import EVALUATION, Context
from hbf.nn.parameters import METRICS, SIGMA_PER, beta_parameter, distance_scale, metric_parameter, sigma_parameter
from hbf.nn.projections import check_heads, of_norm_1, project_out, project_qkv, visible
from hbf.nn.relative_positions import RELATIVE_POSITIONS, append, relative_coordinates, turned
from hbf.ops.hyperbf import (
  IMPLEMENTATIONS,
  NORMALIZATIONS,
  ball_depths,
  direct_responses,
  hyperbf,
  log_responses,
  normalize,
)
from hbf.ops.kernels import DIRECT, KERNELS, SIGNED
from hbf.ops.kmeans import kmeans, sample
from hbf.ops.layout import TENSOR, replicate
from hbf.options import FLAG, NOT_NEGATIVE, POSITIVE, OptionError, one_of, whole


class HyperBFAttention(CheckedModule):
  """Stage 1 (memo eq. 6): y = Σ K(‖W(q − k)‖² / 2σ²) v / Σ K, per head, keys and values computed from the tokens.

  With many memory tokens it is both stages in one: a HyperBF over the tokens and learned centers together (model
  unified). A token costs 8D² + 4(N + m)D operations with metric identity.

  Attributes:
    heads: H; the tokens' width D must be divisible by it. A head works on d = D/H dimensions.
    kernel: a name in `hbf.ops.kernels.KERNELS`.
    metric: of every head, see `hbf.ops.distances`.
    rank: rows of W for metric low_rank, unused by the others.
    sigma_per: 'fixed', 'layer' or 'head': what has a learned σ of its own.
    sigma_scale: at init σ² is this times √d (√rank for low_rank), which keeps q·k/σ² of order 1.
    qk_norm: queries and keys of norm 1 (and σ² at init this times 1/√d).
    memory: m learned centers a head beside the keys: y = (ΣK v + ΣK c) / (ΣK + ΣK); 0 for none.
    relative_positions: 'none', or 'gaussian': a head's distances are over content and place, ‖W(q − k)‖²/2σ² +
      ‖(p_q − p_k − o)/s‖²/2 with a learned offset o and width s (`hbf.nn.relative_positions`). What has no place,
      a class token or a learned center, is at no distance in place from any. A token costs 2 C (N + m) H operations
      more, of C = 4 coordinates, over a text 3, in short types thrice as many. 'rotary': queries and keys are turned
      by their places; with metric identity, whose distances a turn leaves alone.
    mimetic: start of queries and keys with Wq Wkᵀ about this times (Z + I), see `hbf.nn.projections.mimetic_init`;
      0: as other projections. Near 0.7 their norms, and so σ at init, fit as they do without.
    dtype: of the products; parameters are float32.
  """

  heads: Annotated[int, whole(1)]
  kernel: Annotated[str, one_of(KERNELS)] = 'gaussian'
  metric: Annotated[str, one_of(METRICS)] = 'identity'  # queries' and keys' projections are a full metric already
  rank: Annotated[int, whole(0)] = 0
  sigma_per: Annotated[str, one_of(('fixed', 'layer', 'head'))] = 'head'
  sigma_scale: Annotated[float, POSITIVE] = 1.0
  qk_norm: Annotated[bool, FLAG] = False
  memory: Annotated[int, whole(0)] = 0
  relative_positions: Annotated[str, one_of(RELATIVE_POSITIONS)] = 'none'
  mimetic: Annotated[float, NOT_NEGATIVE] = 0.0
  dtype: Any = jnp.float32
  size: ClassVar[str] = 'memory'  # the option that says how large the stage is
  masked: ClassVar[str] = 'any'
  causal: ClassVar[bool] = True
  continues: ClassVar[bool] = True

  @nn.compact
  def __call__(self, tokens: jax.Array, context: Context = EVALUATION) -> jax.Array:
    """Maps tokens [B, N, D] to [B, N, D]."""
    q, k, v = project_qkv(tokens, self.heads, self.dtype, mimetic=self.mimetic)
    return project_out(self._over_tokens(q, k, v, context), self.dtype)

  def _over_tokens(self, q: jax.Array, k: jax.Array, v: jax.Array, context: Context) -> jax.Array:
    """The unit, [B, N, H, e], of queries and keys [B, N, H, d] and values [B, N, H, e]; makes its parameters."""
    q, k, v = (z.swapaxes(1, 2) for z in (q, k, v))
    d = q.shape[-1]
    if self.relative_positions == 'rotary':
      if self.metric != 'identity':
        raise OptionError(
          f'places rotary needs metric identity, and it is {self.metric}: change one of them',
          relative_positions=self.relative_positions,
          metric=self.metric,
        )
      q, k = turned(q, context), turned(k, context)
    k, v = update_cache(self, 'keys', k, context, 2), update_cache(self, 'values', v, context, 2)
    k, v = self._extended('memory_centers', k), self._extended('memory_coefficients', v)
    variance = self.sigma_scale * distance_scale(self.metric, d, self.rank)
    if self.qk_norm:
      q, k = of_norm_1(q), of_norm_1(k)
      variance /= d  # norms are 1 instead of √d
    how: dict[str, Any] = {
      'kernel': self.kernel,
      'sigma': sigma_parameter(self, self.sigma_per, variance, self.heads),
      'metric': self.metric,
      'weights': metric_parameter(self, self.metric, self.heads, d, self.rank),
    }
    if self.relative_positions == 'gaussian':
      # Content over its width, as places are over theirs: σ = 1 then rounds no coordinate of a place.
      q, k = ((z / how['sigma']).astype(z.dtype) for z in (q, k))
      x, t = relative_coordinates(self, self.heads, context, q.dtype)
      q, k = (
        append(q, new_tokens(x, context, q.shape[2], 1)),
        append(k, jnp.pad(t, ((0, 0), (0, self.memory), (0, 0)))),
      )
      how |= {'sigma': 1.0, 'dot_only_dims': x.shape[-1]}
    seen = self._seen(**visible(context, q.shape[2]), length=k.shape[2] - self.memory)
    return hyperbf(q, k, v, **how, **seen).swapaxes(1, 2)

  def _seen(self, mask: jax.Array | None, causal: bool, length: int) -> dict[str, Any]:
    """Which of the keys a token sees, if it sees so of N without the learned ones: all see these."""
    if not self.memory or (mask is None and not causal):
      return {'mask': mask, 'causal': causal}
    mask = jnp.ones((1, length), bool) if mask is None else mask
    mask = jnp.broadcast_to(mask, (*mask.shape[:-1], length))
    if causal:
      mask = mask & np.tri(length, dtype=bool)
    return {'mask': jnp.concatenate([mask, jnp.ones((*mask.shape[:-1], self.memory), bool)], axis=-1)}

  def _extended(self, name: str, z: jax.Array) -> jax.Array:
    """Keys or values [B, H, N, d] followed by the learned ones: [B, H, N + memory, d]."""
    if not self.memory:
      return z
    shape = (z.shape[1], self.memory, z.shape[3])
    learned = self.param(name, nn.initializers.normal(1.0), shape).astype(z.dtype)
    return jnp.concatenate([z, jnp.broadcast_to(learned, z.shape[:1] + shape)], axis=2)


class HyperBFCenters(CheckedModule):
  """Stage 2 (memo eq. 7): z = Σ_a R_a(y) c_a + b over learned centers.

  With several heads each is a HyperBF on its own subspace of d = D/H dimensions that writes to all D outputs.
  At init the unit is alive whatever the kernel, metric and width: a gain makes the mean response to the tokens
  seen at initialization 1 (normalization none), and coefficients are drawn so that the output's scale is
  `coefficients_scale`. With the collection 'responses' mutable it hands out R and log K, [H, B N, A], or the depth in
  the ball where K has no logarithm. A token costs
  4 A D operations (with one head and a diagonal metric).

  Attributes:
    centers: A, for every head.
    heads: H; the tokens' width D must be divisible by it. 1 is the memo's unit.
    kernel: a name in `hbf.ops.kernels.KERNELS`; or with normalization 'none' in `DIRECT`, φ(b_a − r²/2σ²) with a
      learned radius ρ_a of each center, b_a = ρ_a²/2σ². b_a starts as the mean r²/2σ² of the tokens seen at
      initialization, so that half of them lie in its ball. Or `SIGNED`, the authors' exp(−β r²) with a learned β of
      any sign; it needs metric bilinear.
    metric: of every head, see `hbf.ops.distances`.
    rank: rows of W for metric low_rank, unused by the others.
    sigma_per: 'fixed', 'layer', 'head' or 'center': what has a learned σ of its own, or β of kernel `SIGNED`.
    sigma_scale: at init σ² is this times √d (√rank for low_rank), which keeps x·t/σ² of order 1.
    normalize_inputs: points and centers of norm 1 (and σ² at init this times 1/d), so that a center that
      moves at random gets no farther from all tokens at once.
    norm_affine: whether the LayerNorm that the block has before the unit scales and shifts; its centers can do both.
    normalization: of the responses over the centers, see `hbf.ops.hyperbf.normalize`. With 'layer' it takes two
      centers or more: the response of a single one, or of several that are equal, is 0.
    centers_init: 'normal', 'tokens' (drawn from those seen at initialization) or 'kmeans' (of those).
    coefficients_scale: root mean square of the output at init.
    nested: in training all centers respond to one half of the images, and to each of the others a random number of
      the first ones, as often one of 1 to 8 as of 8 to 64: so any number can be taken in the end
      (`hbf.models.nested`; after nested dropout, Rippel et al. 2014). It needs all responses in memory, and a
      'dropout' key in training.
    implementation: how the sums over the centers are computed, see `hbf.ops.hyperbf.hyperbf`.
    dtype: of the products; parameters are float32.
  """

  centers: Annotated[int, whole(1)]
  heads: Annotated[int, whole(1)] = 1
  kernel: Annotated[str, one_of((*KERNELS, *DIRECT, SIGNED))] = 'gaussian'
  metric: Annotated[str, one_of(METRICS)] = 'diagonal'
  rank: Annotated[int, whole(0)] = 0
  sigma_per: Annotated[str, one_of(SIGMA_PER)] = 'center'
  sigma_scale: Annotated[float, POSITIVE] = 0.5
  normalize_inputs: Annotated[bool, FLAG] = False
  norm_affine: Annotated[bool, FLAG] = True
  normalization: Annotated[str, one_of(NORMALIZATIONS)] = 'layer'
  centers_init: Annotated[str, one_of(('normal', 'tokens', 'kmeans'))] = 'tokens'
  coefficients_scale: Annotated[float, NOT_NEGATIVE] = 0.1  # blocks start close to stage 1 alone, and learn faster
  nested: Annotated[bool, FLAG] = False
  implementation: Annotated[str, one_of(IMPLEMENTATIONS)] = 'xla'
  dtype: Any = jnp.float32
  size: ClassVar[str] = 'centers'  # the option that says how large the stage is

  @nn.compact
  def __call__(self, tokens: jax.Array, context: Context = EVALUATION) -> jax.Array:
    """Maps tokens [B, N, D] to [B, N, D]."""
    self._check()
    dimensions = tokens.shape[-1]
    check_heads(dimensions, self.heads)
    d = dimensions // self.heads
    points = tokens.astype(self.dtype).reshape(-1, self.heads, d).swapaxes(0, 1)  # [H, B N, d]
    # Where the parameters are there, Flax asks for the shapes of new ones only: for those a point does, and a program
    # of any number of images has no number of points to draw from.
    drawn_from = points if self.is_initializing() else points[:, :1]
    centers = self.param('centers', CENTERS_INITS[self.centers_init], drawn_from, self.centers).astype(points.dtype)
    variance = self.sigma_scale * distance_scale(self.metric, d, self.rank)
    if self.normalize_inputs:
      points, centers = of_norm_1(points), of_norm_1(centers)
      variance /= d  # norms are 1 instead of √d
    centers = replicate(centers, None, TENSOR, None)  # once: the sums read them several times
    scale = ('beta', beta_parameter) if self.kernel == SIGNED else ('sigma', sigma_parameter)
    terms: dict[str, Any] = {
      scale[0]: scale[1](self, self.sigma_per, variance, self.heads, self.centers),
      'metric': self.metric,
      'weights': metric_parameter(self, self.metric, self.heads, d, self.rank),
    }

    mask = self._first_centers(*tokens.shape[:2]) if self.nested and context.train else None
    balls = self.kernel in DIRECT
    if balls:
      terms['squared_radius'] = self.param(
        'squared_radius', lambda _: -ball_depths(points, centers, **terms).mean(-2, keepdims=True)
      )
    how: dict[str, Any] = {'kernel': self.kernel, **terms}
    log_gain: jax.Array | float = 0.0
    if self.normalization == 'none' and not balls:  # coefficients alone give balls their scale

      def init_log_gain(_: jax.Array) -> jax.Array:
        log_k = log_responses(points, centers, **how)
        return jnp.log(log_k[0].size) - jax.nn.logsumexp(log_k, axis=(1, 2), keepdims=True)

      log_gain = self.param('log_gain', init_log_gain)

    def nearness() -> jax.Array:
      return ball_depths(points, centers, **terms) if balls else log_responses(points, centers, **how)

    def responses() -> jax.Array:
      if balls:
        values = direct_responses(points, centers, **how, normalization=self.normalization)
        return values if mask is None else jnp.where(mask, values, 0)
      return normalize(nearness(), self.normalization, log_gain, mask)

    def init_coefficients(key: jax.Array) -> jax.Array:
      power = jnp.mean(jnp.sum(responses() ** 2, axis=(0, 2)))
      # Less than 1/A there is only where zero mean has left nothing of responses that are all alike.
      size = self.coefficients_scale * jax.lax.rsqrt(jnp.maximum(power, 1 / self.centers))
      return size * jax.random.normal(key, (self.heads, self.centers, dimensions))

    coefficients = replicate(self.param('coefficients', init_coefficients).astype(points.dtype), None, TENSOR, None)
    bias = self.param('bias', nn.initializers.zeros_init(), (dimensions,)).astype(points.dtype)
    if self.is_mutable_collection('responses') and not self.is_initializing():  # for whoever wants to see them
      self.sow('responses', 'responses', responses())
      self.sow('responses', 'log_kernels', nearness())
    how |= {'normalization': self.normalization, 'log_gain': log_gain}
    out = hyperbf(points, centers, coefficients, **how, implementation=self.implementation, mask=mask)
    return (out.sum(axis=0) + bias).reshape(tokens.shape)

  def _check(self) -> None:
    """Raise OptionError if the options contradict each other."""
    if self.kernel == SIGNED and self.metric != 'bilinear':
      raise OptionError(
        f'kernel {SIGNED} needs metric bilinear, not {self.metric}: change one of them',
        kernel=self.kernel,
        metric=self.metric,
      )
    if self.nested and self.implementation != 'xla':
      raise OptionError(
        f'nested centers need all responses in memory: implementation must be xla, not {self.implementation}',
        implementation=self.implementation,
      )

  def _first_centers(self, images: int, length: int) -> jax.Array:
    """Which centers respond to which of the points, drawn for every image: booleans [B N, A]."""
    # An exponent from 1/2 to 1 counts as 1, all centers.
    exponent = jnp.minimum(2 * jax.random.uniform(self.make_rng('dropout'), (images, 1)), 1.0)
    return jnp.repeat(jnp.arange(self.centers) < self.centers**exponent, length, axis=0)


def _normal(key: jax.Array, points: jax.Array, count: int) -> jax.Array:
  heads, _, d = points.shape
  return jax.random.normal(key, (heads, count, d))


def _per_head(start: Any) -> Any:
  """Lets `start(key, points [N, d], count)` work on points [H, N, d]."""

  def init(key: jax.Array, points: jax.Array, count: int) -> jax.Array:
    keys = jax.random.split(key, len(points))
    return jax.vmap(start, in_axes=(0, 0, None))(keys, points.astype(jnp.float32), count)

  return init


# Where centers start, from points [H, N, d] seen at initialization: [H, count, d].
CENTERS_INITS = {'normal': _normal, 'tokens': _per_head(sample), 'kmeans': _per_head(kmeans)}
