"""Tests of relative positions against the formulas in float64, pair by pair of tokens."""

import itertools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from nn.drawn import apply, random_params
from ops import reference
from sampled import sampled

import hbf.ops.fast.attention
from hbf.errors import UserError
from hbf.nn.baselines.linear_attention import LinearAttention
from hbf.nn.baselines.softmax import SoftmaxAttention
from hbf.nn.context import Context
from hbf.nn.hyperbf import HyperBFAttention
from hbf.nn.relative_positions import relative_coordinates
from hbf.options import OptionError

B, D, H = 2, 8, 2
NOWHERE = [(np.nan, np.nan)]
TEXT = np.arange(6, dtype=np.float32)[:, None]


def grid(rows, columns, class_token=True):
  patches = list(itertools.product(range(rows), range(columns)))
  return np.array((NOWHERE if class_token else []) + patches, np.float32)


def context(places, **more):
  return Context(positions=jnp.asarray(places), **more)


def make(module, places, seed=0):
  """Return random tokens for these positions, and parameters."""
  tokens = jnp.asarray(np.random.default_rng(seed).normal(size=(B, len(places), D)), jnp.float32)
  return tokens, random_params(module, tokens, context(places))


def place_distance(p, q, params, h, query=None):
  """Return ‖(p_q − p_k − o)/s‖²/2, or 0 if one of the two has no position. A query changes o and s if it is given."""
  if np.isnan([p, q]).any():
    return 0.0
  offset, log_sigma = params['position_offset'][h, 0], params['position_log_sigma'][h, 0, 0]
  if 'position_slopes' in params:
    *moved, wider = query @ params['position_slopes'][h] / len(query) ** 0.5
    offset, log_sigma = offset + moved, log_sigma + 2 * np.tanh(wider / 2)
  return np.square((q - p - offset) / np.exp(log_sigma)).sum() / 2


def by_the_formula(module, params, tokens, places, mask=None):
  """Compute stage 1 from its equations, in float64."""
  d, memory = D // H, getattr(module, 'memory', 0)
  params = jax.tree.map(lambda z: np.asarray(z, np.float64), params)
  places = np.concatenate([places, np.full((memory, places.shape[1]), np.nan)]).astype(np.float64)
  q, k, v = np.split(np.asarray(tokens, np.float64) @ params['qkv']['kernel'], 3, axis=-1)
  mask = np.ones((tokens.shape[1], len(places)), bool) if mask is None else mask
  joined = np.zeros(tokens.shape)
  for b, h in itertools.product(range(B), range(H)):
    part = slice(h * d, (h + 1) * d)
    queries = q[b, :, part]
    points, keys, values = q[b, :, part], k[b, :, part], v[b, :, part]
    if memory:
      keys = np.concatenate([keys, params['memory_centers'][h]])
      values = np.concatenate([values, params['memory_coefficients'][h]])
    if module.qk_norm:
      points, keys = (z / np.linalg.norm(z, axis=-1, keepdims=True) for z in (points, keys))
    content = content_distances(module, params, points, keys, h)
    for n in range(len(points)):
      s = [content[n, a] + place_distance(places[a], places[n], params, h, queries[n]) for a in range(len(keys))]
      kernel = reference.KERNELS[getattr(module, 'kernel', 'gaussian')]
      responses = np.array([kernel(z) for z in s]) * mask[n]
      joined[b, n, part] = responses @ values / responses.sum()
  return joined @ params['out']['kernel'] + params['out']['bias']


def content_distances(module, params, points, keys, h):
  """Return ‖W(q − k)‖²/2σ², or −q·k/τ for softmax attention."""
  if isinstance(module, SoftmaxAttention):
    temperature = np.exp(2 * params['log_sigma'][h, 0, 0]) if module.qk_norm else points.shape[-1] ** 0.5
    return -points @ keys.T / temperature
  sigma = np.exp(params['log_sigma'][h, 0, 0])
  weights = reference.head(params.get('metric'), h)
  return reference.squared_distances(points, keys, module.metric, weights) / (2 * sigma**2)


HYPERBF = [
  {},
  *({'kernel': kernel} for kernel in reference.KERNELS),
  *({'metric': metric, 'rank': 2} for metric in reference.METRICS),
  {'qk_norm': True},
  {'memory': 3},
  {'memory': 2, 'metric': 'full', 'kernel': 'rational_quadratic'},
]
MODULES = {f'hyperbf {changes}': HyperBFAttention(H, **changes, relative_positions='gaussian') for changes in HYPERBF}
MODULES |= {f'softmax {norm}': SoftmaxAttention(H, norm, relative_positions='gaussian') for norm in (False, True)}
MODULES |= {
  'hyperbf adaptive': HyperBFAttention(H, memory=2, relative_positions='adaptive'),
  'hyperbf adaptive, norm 1': HyperBFAttention(H, memory=2, qk_norm=True, relative_positions='adaptive'),
  'softmax adaptive': SoftmaxAttention(H, relative_positions='adaptive'),
}


def positive(params):
  """Return the parameters with a positive definite M. Other M could give negative distances, which kernels clamp."""
  return params | ({'metric': params['metric'] @ params['metric'].mT} if 'metric' in params else {})


def drawn(module, places):
  tokens, params = make(module, places)
  return tokens, positive(params) if getattr(module, 'metric', '') == 'bilinear' else params


@pytest.mark.parametrize(
  'places', [grid(2, 3), grid(3, 2, class_token=False), TEXT], ids=['class token', 'patches', 'text']
)
@pytest.mark.parametrize('name', sampled(MODULES, every=2))
def test_attention_over_places_equals_the_formula(name, places):
  """The position distance of a class token and of learned centers is 0."""
  module = MODULES[name]
  tokens, params = drawn(module, places)
  result = apply(module, params, tokens, context(places))
  expected = by_the_formula(module, params, tokens, places)
  np.testing.assert_allclose(result, expected, rtol=1e-3, atol=1e-3 * np.abs(expected).max())


@pytest.mark.parametrize(
  'name',
  [
    'hyperbf {}',
    "hyperbf {'kernel': 'rational_quadratic'}",
    "hyperbf {'memory': 3}",
    'softmax False',
    'hyperbf adaptive',
    'hyperbf adaptive, norm 1',
  ],
)
def test_its_gradients_are_the_formulas(name):
  """The derivative along a random direction of each parameter equals a finite difference of the float64 formula."""
  module = MODULES[name]
  places, rng = grid(2, 3), np.random.default_rng(1)
  tokens, params = drawn(module, places)
  total = lambda p: jnp.sum(jnp.sin(module.apply({'params': p}, tokens, context(places))))  # noqa: E731
  gradients = jax.jit(jax.grad(total))(params)
  assert {'position_offset', 'position_log_sigma'} < set(gradients)
  paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(params)]
  for chosen in paths:
    along = jax.tree_util.tree_map_with_path(
      lambda path, z, chosen=chosen: rng.normal(size=z.shape) * (path == chosen), params
    )
    ends = [
      np.sin(by_the_formula(module, jax.tree.map(lambda z, v, e=e: z + e * v, params, along), tokens, places)).sum()
      for e in (-1e-5, 1e-5)
    ]
    expected = (ends[1] - ends[0]) / 2e-5
    result = sum(np.sum(g * v) for g, v in zip(*map(jax.tree.leaves, (gradients, along)), strict=True))
    np.testing.assert_allclose(result, expected, rtol=2e-3, atol=2e-3, err_msg=str(chosen))


@pytest.mark.parametrize('memory', [0, 2])
def test_a_mask_is_kept_to(memory):
  module, places = HyperBFAttention(H, memory=memory, relative_positions='gaussian'), grid(2, 3)
  tokens, params = make(module, places)
  mask = np.tril(np.ones((7, 7), bool))
  result = apply(module, params, tokens, context(places, mask=jnp.asarray(mask)))
  seen = np.concatenate([mask, np.ones((7, memory), bool)], axis=1)
  expected = by_the_formula(module, params, tokens, places, seen)
  np.testing.assert_allclose(result, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize('name', ['hyperbf {}', 'softmax False'])
def test_only_where_tokens_are_relative_to_each_other_matters(name):
  """A shift of all positions changes nothing. The position of a masked token has no effect."""
  module = MODULES[name]
  tokens, params = make(module, grid(3, 4))
  here, there = (apply(module, params, tokens, context(grid(3, 4) + shift)) for shift in (0, np.array([5, -2])))
  np.testing.assert_allclose(here, there, rtol=1e-4, atol=1e-5)
  mask = jnp.arange(13) < 12
  far = grid(3, 4)
  far[12] = 20, 20
  near, away = (apply(module, params, tokens, context(z, mask=mask))[:, :12] for z in (grid(3, 4), far))
  np.testing.assert_allclose(near, away, rtol=1e-4, atol=1e-5)


def narrow(module):
  """Return tokens for 16×16 patches and a class token, parameters of narrow heads, and the positions."""
  places = grid(16, 16)
  tokens, params = make(module, places)
  params['position_log_sigma'] = np.log([0.4, 0.8]).reshape(H, 1, 1).astype('f')
  params['position_offset'] = np.array([[[0.37, -0.93]], [[-1.1, 0.2]]], 'f')
  return tokens, params, places


def value_and_gradients(module, params, tokens, places):
  total = lambda p, z: jnp.mean(jnp.sin(module.apply({'params': p}, z, context(places)).astype('f')))  # noqa: E731
  return jax.jit(jax.value_and_grad(total, argnums=(0, 1)))(params, tokens)


def _as_on_a_gpu(*arrays, default, cuda=None, **_):
  return (cuda or default)(*arrays)


@pytest.fixture(params=['xla', 'cudnn'])
def form(request, monkeypatch):
  """Use XLA's attention, or give it the arrays that cuDNN would get on a GPU. Return a list of their shapes."""
  seen, attention = [], jax.nn.dot_product_attention

  def standing_in(q, k, v, *, implementation=None, **options):
    if implementation == 'cudnn':
      seen.append((q.shape, k.shape))
    return attention(q, k, v, **options)

  if request.param == 'cudnn':
    monkeypatch.setattr(jax.nn, 'dot_product_attention', standing_in)
    monkeypatch.setattr(hbf.ops.fast.attention, 'cudnn_applies', lambda dtype, _: dtype == jnp.bfloat16)
    monkeypatch.setattr(jax.lax, 'platform_dependent', _as_on_a_gpu)
  yield seen
  assert bool(seen) == (request.param == 'cudnn')
  for (_, length, _, d), (_, keys_length, _, _) in seen:
    assert (length % 2, keys_length % 2, d % 8) == (0, 0, 0)


@pytest.mark.parametrize('name', ['hyperbf {}', 'softmax False'])
def test_in_bfloat16_narrow_heads_of_16_by_16_patches_see_and_learn_what_they_do_in_float32(name, form):
  assert_bfloat16_is_near(MODULES[name])


@pytest.mark.slow
def test_in_bfloat16_narrow_heads_with_learned_centers_see_and_learn_what_they_do_in_float32():
  """cuDNN does not compute their attention, because it does not return the normalizer with a gradient."""
  assert_bfloat16_is_near(MODULES["hyperbf {'memory': 3}"], 0.06)


def assert_bfloat16_is_near(module, of_gradients=0.05):
  tokens, params, places = narrow(module)
  params['qkv']['kernel'] *= 0.5
  half = module.clone(dtype=jnp.bfloat16)
  result, expected = (np.asarray(apply(m, params, tokens, context(places)), 'f') for m in (half, module))
  np.testing.assert_allclose(result, expected, atol=0.02 * np.abs(expected).max())
  gradients = [value_and_gradients(m, params, tokens, places)[1] for m in (half, module)]
  for (path, result), (_, expected) in zip(*map(jax.tree_util.tree_leaves_with_path, gradients), strict=True):
    # A token's part in it is rounded where it is s/p of the numbers that it is the difference of.
    tolerance = 0.25 if path[-1] == jax.tree_util.DictKey('position_log_sigma') else of_gradients
    np.testing.assert_allclose(result, expected, atol=tolerance * np.abs(expected).max(), err_msg=str(path))


def test_in_bfloat16_other_kernels_see_the_same_distances():
  module = HyperBFAttention(H, kernel='laplacian', relative_positions='gaussian')
  tokens, params, places = narrow(module)
  params['qkv']['kernel'] *= 0.5
  result, expected = (
    np.asarray(apply(module.clone(dtype=dtype), params, tokens, context(places)), 'f')
    for dtype in (jnp.bfloat16, jnp.float32)
  )
  np.testing.assert_allclose(result, expected, atol=0.02 * np.abs(expected).max())


class _Coordinates(nn.Module):
  """A module that returns the coordinates for relative positions alone."""

  dtype: str

  @nn.compact
  def __call__(self, tokens, context):
    queries = jnp.zeros((1, H, len(context.positions), 1), self.dtype)
    return relative_coordinates(self, 'gaussian', queries, context)


@pytest.mark.parametrize(('dtype', 'tolerance'), [('float32', 0.001), ('float16', 0.001), ('bfloat16', 0.01)])
@pytest.mark.parametrize('step', [pytest.param(1, marks=pytest.mark.slow), 1.3])
def test_short_types_hold_the_distances_of_narrow_heads_of_16_by_16_patches(step, dtype, tolerance):
  """For a corner, ‖p‖²/2s² is 350. Rounding it to a single bfloat16 number would change it by up to 1."""
  _, params, places = narrow(MODULES['hyperbf {}'])
  places = step * places
  params = {name: params[name] for name in ('position_offset', 'position_log_sigma')}
  queries, keys = jax.jit(_Coordinates(dtype).apply)({'params': params}, None, context(places))
  assert queries.dtype == keys.dtype == dtype
  products = np.einsum('hnc,hac->hna', np.asarray(queries, np.float64), np.asarray(keys, np.float64))
  # The distances of place_distance, of all pairs at once: there are 132,098.
  offset, log_sigma = (np.asarray(z, np.float64)[:, :, None] for z in params.values())
  apart = (places[:, None].astype(np.float64) - places - offset) / np.exp(log_sigma)
  expected = -np.nan_to_num(np.square(apart).sum(-1) / 2)
  np.testing.assert_allclose(products, expected, atol=tolerance)


@pytest.mark.parametrize(('dtype', 'coordinates'), [('float16', 18), ('bfloat16', 18), ('float64', 3)])
def test_other_types_hold_the_distances_of_a_narrow_head_of_a_long_text_as_well_as_float32(dtype, coordinates):
  """At the ends of 1,024 tokens ‖p‖²/2s² is a million, and −1/s² · ‖p‖²/2 cancels it beside the offset."""
  params = {'position_offset': np.full((H, 1, 1), 1.13, 'f'), 'position_log_sigma': np.full((H, 1, 1), -1, 'f')}
  text = np.arange(1024, dtype='f')[:, None]
  middle = np.arange(8, 1016)
  errors = {}
  for kind in ('float32', dtype):
    with jax.enable_x64(kind == 'float64'):
      queries, keys = jax.jit(_Coordinates(kind).apply)({'params': params}, None, context(text))
    assert queries.dtype == keys.dtype == kind
    queries, keys = (np.asarray(z[0], np.float64) for z in (queries, keys))
    seen = [
      np.abs((queries[middle] * keys[middle - back]).sum(-1) + (back - np.float32(1.13)) ** 2 / 2 * np.exp(2))
      for back in range(-1, 4)
    ]
    errors[kind] = np.max(seen)
  assert keys.shape[-1] == coordinates
  assert errors[dtype] < 1.5 * errors['float32'] < 0.2


@pytest.mark.parametrize(('places', 'count'), [(grid(16, 16), 12), (grid(40, 40), 24), (TEXT, 9)])
def test_where_positions_are_few_two_short_numbers_hold_a_coordinate(places, count):
  module = _Coordinates('bfloat16')
  shapes = jax.eval_shape(lambda: module.init_with_output(jax.random.key(0), None, context(places))[0])
  assert [z.shape[-1] for z in shapes] == [count, count]


def test_a_narrow_head_is_its_neighbors_mean_at_any_size_of_image():
  """If all queries and keys are 0, the output is the patches around p − o, weighted by a Gaussian."""
  module = HyperBFAttention(H, relative_positions='gaussian')
  for places in (grid(4, 4, class_token=False), grid(7, 5, class_token=False)):
    tokens, params = make(module, places)
    params['qkv']['kernel'][:, : 2 * D] = 0
    params['out'] = {'kernel': np.eye(D, dtype='f'), 'bias': np.zeros(D, 'f')}
    params['position_log_sigma'] = np.full((H, 1, 1), np.log(0.1), 'f')
    params['position_offset'] = np.array([[[1, 0]], [[0, -1]]], 'f')
    above, right = (
      [next((i for i, p in enumerate(places) if (p == place).all()), None) for place in places + step]
      for step in ((-1, 0), (0, 1))
    )
    values = np.asarray(tokens) @ params['qkv']['kernel'][:, 2 * D :]
    result = jax.jit(module.apply)({'params': params}, tokens, context(places))
    for h, neighbors in enumerate((above, right)):
      part = slice(h * D // H, (h + 1) * D // H)
      for i, j in enumerate(neighbors):
        if j is not None:
          np.testing.assert_allclose(result[:, i, part], values[:, j, part], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize('heads', [1, 2, 4, 8])
def test_heads_start_each_on_another_one_of_the_nearest_neighbors(heads):
  module, tokens = HyperBFAttention(heads, relative_positions='gaussian'), jnp.ones((1, 4, D))
  init = jax.jit(lambda key: module.init(key, tokens, context(grid(2, 2, class_token=False))))
  params = init(jax.random.key(0))['params']
  offsets = [tuple(map(int, offset)) for offset in np.asarray(params['position_offset'][:, 0])]
  around = sorted(itertools.product(range(-3, 4), repeat=2), key=lambda offset: np.hypot(*offset))[1:]
  np.testing.assert_array_equal(np.hypot(*np.transpose(offsets)), [np.hypot(*offset) for offset in around[:heads]])
  assert len({*offsets}) == heads
  np.testing.assert_allclose(np.exp(params['position_log_sigma']), 0.5)


@pytest.mark.parametrize('causal', [False, True])
def test_over_a_text_half_of_the_heads_start_beside_and_the_others_far_and_wide(causal):
  module = HyperBFAttention(4, relative_positions='gaussian')
  tokens = jnp.ones((1, 6, D))
  params = jax.jit(lambda key: module.init(key, tokens, context(TEXT, causal=causal)))(jax.random.key(0))['params']
  assert params['position_offset'][:, 0, 0].tolist() == ([1, 2, 0, 0] if causal else [-1, 1, 0, 0])
  np.testing.assert_allclose(np.exp(params['position_log_sigma'][:, 0, 0]), [0.5, 0.5, 4, 16], rtol=1e-6)


@pytest.mark.parametrize('kind', [HyperBFAttention, SoftmaxAttention])
def test_without_the_option_places_are_not_looked_at(kind):
  module = kind(H)
  tokens, params = make(module, grid(2, 3))
  outs = [apply(module, params, tokens, z) for z in (Context(), context(grid(2, 3)))]
  np.testing.assert_array_equal(*outs)
  assert not [name for name in params if name.startswith('place')]


def test_softmax_of_unit_norm_and_hyperbf_of_unit_norm_are_the_same_over_places_too():
  """This is fact 1 of docs/explanation/attention.md. Both modules have the same parameters."""
  places = grid(2, 3)
  pair = MODULES['softmax True'], MODULES["hyperbf {'qk_norm': True}"]
  tokens, params = make(pair[0], places)
  results = [apply(module, params, tokens, context(places)) for module in pair]
  np.testing.assert_allclose(*results, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize('kind', [HyperBFAttention, SoftmaxAttention])
@pytest.mark.parametrize(
  ('places', 'option', 'message'),
  [
    (None, 'gaussian', 'relative_positions gaussian needs tokens that have positions'),
    (grid(1, 3), 'gauss', "unknown relative_positions 'gauss': did you mean 'gaussian'"),
  ],
)
def test_what_can_not_be_is_a_user_error(kind, places, option, message):
  with pytest.raises(UserError, match=message):
    jax.eval_shape(
      kind(H, relative_positions=option).init, jax.random.key(0), jnp.ones((1, 3, D)), Context(positions=places)
    )


def test_rotary_attention_takes_positions_of_one_or_two_dimensions():
  module, places = ROTARY['softmax'], np.zeros((3, 3), 'f')
  with pytest.raises(OptionError, match='rotary needs positions of 1 or 2 dimensions, and these have 3'):
    jax.eval_shape(module.init, jax.random.key(0), jnp.ones((1, 3, D)), context(places))


def test_linear_attention_has_no_such_option():
  assert 'places' not in LinearAttention.__dataclass_fields__


ROTARY = {
  'hyperbf': HyperBFAttention(H, relative_positions='rotary', memory=2),
  'hyperbf unit': HyperBFAttention(H, relative_positions='rotary', qk_norm=True, kernel='laplacian'),
  'softmax': SoftmaxAttention(H, relative_positions='rotary'),
}


def turn(vector, place, pairs):
  """Return a vector whose coordinates i and i + d/2 are rotated in their plane, unless it has no position."""
  out, half, place = vector.copy(), len(vector) // 2, np.nan_to_num(place)
  for axis, coordinate in enumerate(place):
    for i in range(pairs):
      angle = coordinate * {1: 10_000.0, 2: 100.0}[len(place)] ** (-i / pairs)
      a, b = axis * pairs + i, axis * pairs + i + half
      out[a] = vector[a] * np.cos(angle) - vector[b] * np.sin(angle)
      out[b] = vector[b] * np.cos(angle) + vector[a] * np.sin(angle)
  return out


@pytest.mark.parametrize('places', [grid(2, 3), np.arange(5.0)[:, None]], ids=['image', 'text'])
def test_rotary_attention_is_that_of_queries_and_keys_turned_one_by_one(places):
  """The expected softmax attention is computed from the formula in float64."""
  tokens, params = make(ROTARY['softmax'], places)
  q, k, v = np.split(np.asarray(tokens, np.float64) @ params['qkv']['kernel'], 3, axis=-1)
  joined, d = np.zeros(tokens.shape), D // H
  for b, h in itertools.product(range(B), range(H)):
    part = slice(h * d, (h + 1) * d)
    queries, keys = (
      np.array([turn(x, p, d // (2 * places.shape[1])) for x, p in zip(z[b, :, part], places, strict=True)])
      for z in (q, k)
    )
    joined[b, :, part] = reference.softmax(queries @ keys.T / d**0.5) @ v[b, :, part]
  expected = joined @ params['out']['kernel'] + params['out']['bias']
  result = apply(ROTARY['softmax'], params, tokens, context(places))
  np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize('name', ROTARY)
def test_rotary_attention_depends_on_where_tokens_are_from_each_other(name):
  """A shift of all positions changes nothing. Other relative positions change the outputs."""
  module, places = ROTARY[name].clone(memory=0) if 'hyperbf' in name else ROTARY[name], grid(3, 4, class_token=False)
  tokens, params = make(module, places)
  here, there, mixed = (
    np.asarray(apply(module, params, tokens, context(z))) for z in (places, places + [5, -2], places[::-1] ** 2)
  )
  np.testing.assert_allclose(here, there, rtol=1e-3, atol=1e-4)
  assert np.abs(here - mixed).max() > 0.01


def test_tokens_that_are_nowhere_and_learned_centers_are_not_turned():
  """If no token has a position, attention is the same as without relative positions."""
  module, nowhere = ROTARY['hyperbf'], np.full((5, 2), np.nan, 'f')
  tokens, params = make(module, nowhere)
  plain = apply(module.clone(relative_positions='none'), params, tokens)
  np.testing.assert_allclose(apply(module, params, tokens, context(nowhere)), plain, rtol=1e-6)


@pytest.mark.parametrize(
  ('module', 'places', 'message'),
  [
    (
      SoftmaxAttention(H, relative_positions='rotary'),
      None,
      'relative_positions rotary needs tokens that have positions',
    ),
    (SoftmaxAttention(4, relative_positions='rotary'), grid(2, 2), 'a multiple of 4 dimensions, and here are 2'),
    (
      HyperBFAttention(H, relative_positions='rotary', metric='diagonal'),
      grid(2, 2),
      'needs metric identity, and it is diag',
    ),
  ],
)
def test_what_rotary_can_not_turn_is_refused(module, places, message):
  tokens = jnp.ones((B, 5, D))
  with pytest.raises(UserError, match=message):
    module.init(jax.random.key(0), tokens, Context(positions=None if places is None else jnp.asarray(places)))
