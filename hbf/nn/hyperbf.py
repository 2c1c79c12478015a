"""The two HyperBF stages: stage 1 over the tokens, stage 2 over learned centers. Both call `hbf.ops.hyperbf`."""

import dataclasses
from collections.abc import Callable
from typing import Annotated, Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from hbf.errors import warn
from hbf.nn.cache import update_cache
from hbf.nn.checked import CheckedModule
from hbf.nn.context import EVALUATION, Context, check_context
from hbf.nn.parameters import METRICS, SIGMA_PER, beta_parameter, distance_scale, metric_parameter, sigma_parameter
from hbf.nn.projections import check_heads, mask_and_causality, of_norm_1, project_out, project_qkv, split_heads
from hbf.nn.relative_positions import GAUSSIAN, RELATIVE_POSITIONS, append_coordinates, relative_coordinates, rotate
from hbf.nn.traits import TOKENWISE, StageTraits
from hbf.ops.basis import RadialBasis
from hbf.ops.fast.choice import IMPLEMENTATIONS
from hbf.ops.hyperbf import hyperbf, nearness, partial_sum, responses
from hbf.ops.kernels import BALLS, DIRECT, KERNELS, SIGNED
from hbf.ops.kmeans import kmeans, sample
from hbf.ops.layout import TENSOR, laid_out_by_xla, replicate
from hbf.ops.normalization import NORMALIZATIONS
from hbf.ops.union import PartialSum, unite
from hbf.options import FLAG, FLOATS, NOT_NEGATIVE, POSITIVE, OptionError, one_of, whole


class HyperBFAttention(CheckedModule):
  """Stage 1 (CBMM Memo 143, eq. 6): y = Σ K v / Σ K in every head, with K = K(‖W(q − k)‖² / 2σ²).

  Queries q, keys k and values v are computed from the tokens. With many learned centers (`memory`), this stage does
  the work of both stages: it is one HyperBF over the tokens and the learned centers (model `unified`). With metric
  identity, N tokens and m learned centers, a token costs 8D² + 4(N + m)D operations.

  Attributes:
    heads: H, a divisor of the tokens' width D. A head works on d = D/H dimensions.
    kernel: a name in `hbf.ops.kernels.KERNELS`.
    metric: the metric of every head, see `hbf.ops.distances`.
    rank: number of rows of W for metric low_rank. Other metrics do not use it.
    sigma_per: 'layer' or 'head': each layer or each head learns one σ. 'fixed': σ keeps its initial value.
    sigma_scale: the initial σ² is this number times √d, or times √rank for metric low_rank. If the number is near 1,
      the products q·k/σ² are of order 1 at first.
    qk_norm: True to scale queries and keys to norm 1. The initial σ² is then divided by d.
    memory: m, the number of learned centers of a head. The centers are additional keys, and their learned
      coefficients c are additional values: y = (Σ_keys K v + Σ_centers K c) / (Σ_keys K + Σ_centers K). 0: there are
      no learned centers.
    relative_positions: 'none', 'gaussian', 'adaptive' or 'rotary' (`hbf.nn.relative_positions`). With 'gaussian' a
      head adds the distance of positions p to the distance of contents: ‖W(q − k)‖²/2σ² + ‖(p_q − p_k − o)/s‖²/2.
      The offset o and the scale s are learned. For a token without a position and for a learned center, the added
      distance is 0. This costs 2 C N H operations for each token. C is the number of additional coordinates in
      a head: 4 for images and 3 for texts. If `dtype` is bfloat16, there are three times as many up to 32 tokens
      along an axis, and six times as many beyond. With 'adaptive' o and s also depend on the query. This costs
      another 2 D (P + 1) operations for positions of P dimensions. With 'rotary' queries and keys are rotated by
      their positions. This needs metric identity, because its distances do not change if both vectors are rotated in
      the same way.
    mimetic: α. The projections of queries and keys start with Wq Wkᵀ ≈ α (Z + I) for a random matrix Z, see
      `hbf.nn.projections.mimetic_init`. With α near 0.7, the initial σ suits the norms of queries and keys. 0: these
      projections start like all others.
    dtype: type of the matrix products. Parameters are float32.
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
  dtype: Annotated[Any, FLOATS] = jnp.float32
  traits: ClassVar[StageTraits] = StageTraits(units='memory', masks='any', causal=True, decodes=True)

  @nn.compact
  def __call__(self, tokens: Float[Array, 'B N D'], context: Context = EVALUATION) -> Float[Array, 'B N D']:
    """Map tokens [B, N, D] to [B, N, D]."""
    check_context(self, context, tokens.shape)
    sigma = self._sigma(tokens.shape[-1])
    q, k, v = project_qkv(tokens, self.heads, self.dtype, mimetic=self.mimetic, sigma=None if self.qk_norm else sigma)
    return project_out(self._over_tokens(q, k, v, sigma, context), self.dtype)

  def _sigma(self, width: int) -> Float[Array, '#H 1 1']:
    """Return σ of every head, or one σ for all heads."""
    check_heads(width, self.heads)
    d = width // self.heads
    variance = self.sigma_scale * distance_scale(self.metric, d, self.rank)
    if self.qk_norm:
      variance /= d  # norms are 1 instead of √d
    return sigma_parameter(self, self.sigma_per, variance, self.heads)

  def _over_tokens(self, q: jax.Array, k: jax.Array, v: jax.Array, sigma: jax.Array, context: Context) -> jax.Array:
    """Return the outputs [B, N, H, e] of the heads for queries and keys [B, N, H, d] and values [B, N, H, e].

    Queries and keys are already divided by σ, unless they are scaled to norm 1 here. So the operator's σ is 1.
    """
    q, k, v = (z.swapaxes(1, 2) for z in (q, k, v))
    given, d = q, q.shape[-1]
    if self.relative_positions == 'rotary':
      self._check_rotary()
      q, k = rotate(q, context), rotate(k, context)
    k, v = update_cache(self, 'keys', k, context, 2), update_cache(self, 'values', v, context, 2)
    if self.qk_norm:
      q, k = ((of_norm_1(z) / sigma).astype(z.dtype) for z in (q, k))
    learned = self._memory_parameters(k, v, sigma) if self.memory else None
    weights = metric_parameter(self, self.metric, self.heads, d, self.rank)
    basis = RadialBasis(self.kernel, 1.0, metric=self.metric, weights=weights)
    over_memory = self._over_memory(q, *learned, basis) if learned else None
    if self.relative_positions in GAUSSIAN:
      divisor = 1.0 if self.qk_norm else sigma
      x, t = relative_coordinates(self, self.relative_positions, given, context, divisor)
      q, k = append_coordinates(q, x), append_coordinates(k, t)
      basis = dataclasses.replace(basis, dot_only_dims=x.shape[-1])
    mask, causal = mask_and_causality(context, q.shape[2])
    if over_memory is None:
      return hyperbf(q, k, v, basis, mask=mask, causal=causal).swapaxes(1, 2)
    return unite(partial_sum(q, k, v, basis, mask=mask, causal=causal), over_memory).swapaxes(1, 2)

  def _check_rotary(self) -> None:
    """Raise OptionError unless the metric is identity, which rotary positions need."""
    if self.metric != 'identity':
      raise OptionError(
        f'relative_positions rotary needs metric identity, and it is {self.metric}: change one of them',
        relative_positions=self.relative_positions,
        metric=self.metric,
      )

  def _memory_parameters(self, k: jax.Array, v: jax.Array, sigma: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return learned centers [H, m, d] and coefficients [H, m, e] for keys [B, H, N, d] and values [B, H, N, e].

    The returned centers are divided by σ, like queries and keys.
    """
    init = nn.initializers.normal(1.0)
    centers = self.param('memory_centers', init, (self.heads, self.memory, k.shape[3]), jnp.float32)
    coefficients = self.param('memory_coefficients', init, (self.heads, self.memory, v.shape[3]), jnp.float32)
    centers = (of_norm_1(centers) if self.qk_norm else centers) / sigma
    return centers.astype(k.dtype), coefficients.astype(v.dtype)

  def _over_memory(self, q: jax.Array, centers: jax.Array, coefficients: jax.Array, basis: RadialBasis) -> PartialSum:
    """Return the sum over the learned centers for queries [B, H, n, d]. Every token sees all learned centers."""
    # The queries of all images are the rows of one matrix for each head. So no image needs a copy of the centers.
    by_head = q.swapaxes(0, 1)
    over = partial_sum(by_head.reshape(self.heads, -1, q.shape[3]), centers, coefficients, basis)
    return PartialSum(*(z.reshape(*by_head.shape[:3], z.shape[-1]).swapaxes(0, 1) for z in over))


class HyperBFCenters(CheckedModule):
  """Stage 2 (CBMM Memo 143, eq. 7): z = Σ_a R_a(y) c_a + b over learned centers.

  Each head is a HyperBF on its own d = D/H dimensions. Its coefficients have D dimensions, and the outputs of all
  heads are added. With one head and a diagonal metric, a token costs 4 A D operations.

  The initial output has the same size for every kernel, metric and sigma at which the responses are not nearly all 0:
  coefficients are drawn so that its root mean square is `coefficients_scale`. With normalization 'none', the
  responses of a kernel in `KERNELS` are also multiplied by a learned gain. It starts so that the multiplied responses
  to the tokens seen at initialization have the mean 1.

  If Flax's collection 'responses' is mutable, the stage stores R and log K there, [H, B N, A] each. With linear
  coefficients, the stored R is already multiplied by u_a·x + w_a. For kernels in `BALLS` and `VALUES`, the stage
  stores the depth (`hbf.ops.kernels`) instead of log K.

  Attributes:
    centers: A, the number of centers of every head.
    heads: H, the number of heads. It divides the tokens' width D. CBMM Memo 143 has one head.
    kernel: a name in `hbf.ops.kernels.KERNELS`, `BALLS` or `VALUES`, or `SIGNED`. Ball kernels (`BALLS`) are φ(b_a −
      r²/2σ²) with b_a = ρ_a²/2σ² and a learned radius ρ_a for each center. Ball kernels and the kernels in `VALUES`
      ('multiquadric', 'thin_plate', 'wendland') need normalization 'none'. `SIGNED`, which is 'signed_gaussian', is
      exp(−β r²) with a learned β of any sign, as in the authors' code. It needs metric bilinear.
    metric: the metric of every head, see `hbf.ops.distances`.
    rank: number of rows of W for metric low_rank. Other metrics do not use it.
    sigma_per: 'layer', 'head' or 'center': each layer, each head or each center learns one σ (one β for kernel
      'signed_gaussian'). 'fixed': σ or β keeps its initial value.
    sigma_scale: the initial σ² is this number times √d, or times √rank for metric low_rank. If the number is near 1,
      the products x·t/σ² are of order 1 at first. Two different tokens have s ≈ √d / `sigma_scale`, and kernel
      'wendland' is 0 for s ≥ 10. So with many dimensions it needs a larger number, such as √d/5. With less, a center
      responds to few tokens or none, and the initial output is smaller.
    normalize_inputs: True to scale points and centers to norm 1. The initial σ² is then divided by d. A center then
      cannot move away from all tokens at once.
    norm_affine: True if the block's LayerNorm before this stage has a scale and a bias. A learned metric can
      replace the scale, and the centers can replace the bias.
    normalization: a name in `hbf.ops.normalization.NORMALIZATIONS`. 'layer' needs at least two different centers. The
      response of a single center would be 0.
    radius: the parameter for the ball of each center. 'relative': the depth δ_a of a token that has norm √d and is
      orthogonal to the center. So b_a = δ_a + (‖t_a‖² + d)/2σ², and δ_a starts at 0. With `normalize_inputs` d is
      replaced by 1. 'absolute': b_a itself, which starts as the mean of r²/2σ² over the tokens seen at
      initialization. In both cases, about half of the tokens lie in a ball at first. With 'absolute', a change of a
      center's length moves all tokens into its ball or out of it. Such changes then dominate training.
    coefficients: 'constant': the coefficients are c_a. 'linear': they are (u_a·x + w_a) c_a with learned u_a and w_a,
      a linear function of the token x. A token then costs 6 A D operations. With kernel 'ball_silu' and radius
      'relative', the stage equals a SwiGLU on tokens of norm √d.
    centers_init: initial values of the centers. 'normal': Gaussian random numbers. 'tokens': tokens drawn from those
      seen at initialization. 'kmeans': k-means centers of these tokens. So initialize with real inputs. With equal
      tokens, such as those of an input of ones, all centers start equal, and the stage can hardly learn.
    coefficients_scale: root mean square of the stage's output at initialization.
    nested: True to train the first centers to work without the others too (`hbf.models.nested`; after nested dropout,
      Rippel et al. 2014). In training, every image is given all centers with probability 1/2, and else only the first
      n centers, where n is random and log n is uniform. The option needs all responses in memory, and a random key
      'dropout' in training.
    implementation: 'xla', 'pallas' (fused kernels for a TPU) or 'plain' (the definition, with all responses in
      memory). 'pallas' is not for nested centers, linear coefficients, or kernels in `BALLS` and `VALUES`.
    dtype: type of the matrix products. Parameters are float32.
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
  radius: Annotated[str, one_of(('relative', 'absolute'))] = 'relative'
  coefficients: Annotated[str, one_of(('constant', 'linear'))] = 'constant'
  coefficients_scale: Annotated[float, NOT_NEGATIVE] = 0.1  # blocks start close to stage 1 alone, and learn faster
  nested: Annotated[bool, FLAG] = False
  implementation: Annotated[str, one_of(IMPLEMENTATIONS)] = 'xla'
  dtype: Annotated[Any, FLOATS] = jnp.float32
  traits: ClassVar[StageTraits] = dataclasses.replace(TOKENWISE, units='centers')

  @nn.compact
  def __call__(self, tokens: Float[Array, 'B N D'], context: Context = EVALUATION) -> Float[Array, 'B N D']:
    """Map tokens [B, N, D] to [B, N, D]."""
    self._check(tokens.shape[-1])
    points = split_heads(tokens.astype(self.dtype).reshape(-1, tokens.shape[-1]), self.heads).swapaxes(0, 1)
    given, centers = points, self._centers(points)
    if self.normalize_inputs:
      points, centers = of_norm_1(points), of_norm_1(centers)
    centers = replicate(centers, None, TENSOR, None)  # once, because the sums use them several times
    basis = self._basis(points, centers)
    factors = self._factors(given)
    mask = self._first_centers(*tokens.shape[:2]) if self.nested and context.train else None
    coefficients = self._coefficients(
      lambda: responses(points, centers, basis, mask, factors), tokens.shape[-1], points.dtype
    )
    bias = self.param('bias', nn.initializers.zeros_init(), tokens.shape[-1:], jnp.float32).astype(points.dtype)
    if self.is_mutable_collection('responses') and not self.is_initializing():
      self.sow('responses', 'responses', responses(points, centers, basis, mask, factors))
      self.sow('responses', 'log_kernels', nearness(points, centers, basis))
    out = hyperbf(
      points, centers, coefficients, basis, mask=mask, factors=factors, implementation=self.implementation
    )
    return (out.sum(axis=0) + bias).reshape(tokens.shape)

  def _centers(self, points: jax.Array) -> jax.Array:
    """Return the learned centers [H, A, d], which start as `centers_init` says."""
    # Once the parameter exists, Flax uses the initializer for its shape only, so any point will do. In a program for
    # any number of images the number of points is unknown, and `count` points could not be drawn.
    drawn_from = points if self.is_initializing() else jnp.zeros((points.shape[0], 1, points.shape[2]), points.dtype)
    if self.is_initializing() and self.centers_init != 'normal' and _all_equal(points):
      warn(
        f'{"/".join(self.path) or type(self).__name__} was initialized with tokens that are all equal, as an input '
        'of ones makes them. Its centers then start equal, and the stage can hardly learn: initialize the model with '
        "real inputs, or set centers_init='normal'"
      )
    return self.param('centers', CENTERS_INITS[self.centers_init], drawn_from, self.centers).astype(points.dtype)

  def _basis(self, points: jax.Array, centers: jax.Array) -> RadialBasis:
    """Return the learned radial basis for points [H, B N, d] and centers [H, A, d]."""
    d = points.shape[-1]
    variance = self.sigma_scale * distance_scale(self.metric, d, self.rank)
    if self.normalize_inputs:
      variance /= d  # norms are 1 instead of √d
    name, parameter = ('beta', beta_parameter) if self.kernel == SIGNED else ('sigma', sigma_parameter)
    scale: dict[str, Any] = {name: parameter(self, self.sigma_per, variance, self.heads, self.centers)}
    weights = metric_parameter(self, self.metric, self.heads, d, self.rank)
    basis = RadialBasis(self.kernel, metric=self.metric, weights=weights, normalization=self.normalization, **scale)
    if self.kernel in BALLS:
      return dataclasses.replace(basis, squared_radius=self._squared_radius(points, centers, basis))
    if self.normalization == 'none' and self.kernel not in DIRECT:  # coefficients alone scale `DIRECT` kernels
      return dataclasses.replace(basis, log_gain=self._log_gain(points, centers, basis))
    return basis

  def _squared_radius(self, points: jax.Array, centers: jax.Array, basis: RadialBasis) -> jax.Array:
    """Return b = ρ²/2σ² [H, 1, A] of the balls of all centers, as option `radius` says."""
    if self.radius == 'relative':
      depth = self.param('depth', nn.initializers.zeros_init(), (self.heads, 1, self.centers), jnp.float32)
      norm = 1 if self.normalize_inputs else points.shape[-1]
      norms = jnp.sum(jnp.square(centers.astype(jnp.float32)), axis=-1)[:, None, :]
      return depth + (norms + norm) * basis.scale(points.dtype)

    def init(_: jax.Array) -> jax.Array:
      if points.shape[1] == 0:
        return jnp.zeros((self.heads, 1, self.centers), jnp.float32)
      return _float32(-nearness(points, centers, basis).mean(-2, keepdims=True))

    return self.param('squared_radius', init)

  def _factors(self, points: jax.Array) -> jax.Array | None:
    """Return the factors u_a·x + w_a [H, B N, A] for points x [H, B N, d]. None if coefficients are constant."""
    if self.coefficients == 'constant':
      return None
    shape = (self.heads, self.centers, points.shape[-1])
    normal, zeros = nn.initializers.normal(points.shape[-1] ** -0.5), nn.initializers.zeros_init()
    slopes = self.param('slopes', normal, shape, jnp.float32).astype(points.dtype)
    start = self.param('slope_bias', zeros, (self.heads, 1, self.centers), jnp.float32)
    return jnp.einsum('hnd,had->hna', points, slopes) + start.astype(points.dtype)

  def _log_gain(self, points: jax.Array, centers: jax.Array, basis: RadialBasis) -> jax.Array:
    """Return the logarithms [H, 1, 1] of the gains. At first, a gain is the inverse of its head's mean response."""

    def init(_: jax.Array) -> jax.Array:
      if points.shape[1] == 0:
        return jnp.zeros((self.heads, 1, 1), jnp.float32)
      log_k = nearness(points, centers, basis)
      return _float32(jnp.log(log_k[0].size) - jax.nn.logsumexp(log_k, axis=(1, 2), keepdims=True))

    return self.param('log_gain', init)

  def _coefficients(self, at_init: Callable[[], jax.Array], dimensions: int, dtype: Any) -> jax.Array:
    """Return the learned coefficients [H, A, dimensions]. The responses `at_init()` set their initial scale."""

    def init(key: jax.Array) -> jax.Array:
      r = at_init()
      power = jnp.mean(jnp.sum(r**2, axis=(0, 2))) if r.shape[1] != 0 else 0.0  # without tokens: any finite size
      # The power is below 1/A if normalization 'layer' subtracts the mean of responses that are nearly equal, or if a
      # kernel of compact support is 0 at nearly all tokens. Coefficients for such small responses would be too large.
      size = self.coefficients_scale * jax.lax.rsqrt(jnp.maximum(power, 1 / self.centers))
      return _float32(size * jax.random.normal(key, (self.heads, self.centers, dimensions)))

    return replicate(self.param('coefficients', init).astype(dtype), None, TENSOR, None)

  def _check(self, dimensions: int) -> None:
    """Raise OptionError if the options contradict each other, or do not fit tokens of this many dimensions.

    At initialization, raise it also if the stage could not learn.
    """
    if self.kernel == SIGNED and self.metric != 'bilinear':
      raise OptionError(
        f'kernel {SIGNED} needs metric bilinear, not {self.metric}: change one of them',
        kernel=self.kernel,
        metric=self.metric,
      )
    if self.implementation == 'pallas':
      self._check_pallas()
    check_heads(dimensions, self.heads)
    # Trained centers may be used one by one, as those of `nested`.
    if self.is_initializing() and self.normalization == 'layer' and self.centers == 1:
      raise OptionError(
        'normalization layer needs two centers or more, because the response of a single one is 0: add centers, or '
        'change the normalization',
        centers=self.centers,
        normalization=self.normalization,
      )

  def _check_pallas(self) -> None:
    """Raise OptionError if the Pallas kernels do not compute this stage."""
    wrong = ''
    if self.nested:
      wrong = 'nested centers need all responses in memory'
    elif self.coefficients == 'linear':
      wrong = 'linear coefficients need all responses in memory'
    elif self.kernel in DIRECT:
      wrong = f'kernel {self.kernel} has no fused form'
    if wrong:
      raise OptionError(
        f'{wrong}: implementation must be xla or plain, not pallas', implementation=self.implementation
      )

  def _first_centers(self, images: int, length: int) -> jax.Array:
    """Draw a number n for every image, as option `nested` says. Return booleans [B N, A].

    Each of the `length` tokens of an image has a row, which is True for the first n centers.
    """
    # Half of the exponents are clipped to 1, which keeps all centers.
    exponent = jnp.minimum(2 * jax.random.uniform(self.make_rng('dropout'), (images, 1)), 1.0)
    return jnp.repeat(jnp.arange(self.centers) < self.centers**exponent, length, axis=0)


def _all_equal(points: jax.Array) -> bool:
  """Return True if all points of a head [H, N, d] are known to be equal. Inside jit, the values are not known."""
  if isinstance(points, jax.core.Tracer) or not points.size:
    return False
  return bool((points.max(axis=1) == points.min(axis=1)).all())


def _float32(start: jax.Array) -> jax.Array:
  """Return the initial value of a parameter in float32, the type of all parameters, also under jax_enable_x64."""
  return start.astype(jnp.float32)


def _normal(key: jax.Array, points: jax.Array, count: int) -> jax.Array:
  heads, _, d = points.shape
  return jax.random.normal(key, (heads, count, d), jnp.float32)


def _per_head(start: Any) -> Any:
  """Return a function that applies `start(key, points [N, d], count)` to each head of points [H, N, d]."""

  def init(key: jax.Array, points: jax.Array, count: int) -> jax.Array:
    starts = jax.vmap(lambda key, points: start(key, points, count))
    keys = jax.random.split(key, len(points))
    return laid_out_by_xla(starts, PartitionSpec(), keys, points.astype(jnp.float32))

  return init


# Functions that return initial centers [H, count, d] for points [H, N, d] seen at initialization.
CENTERS_INITS = {'normal': _normal, 'tokens': _per_head(sample), 'kmeans': _per_head(kmeans)}
