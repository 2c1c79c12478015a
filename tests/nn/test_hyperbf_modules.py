import itertools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from nn.drawn import apply, random_params
from ops import reference
from ops.keywords import hyperbf, hyperbf_plain, log_responses

import hbf.nn.hyperbf
import hbf.ops.hyperbf
from hbf.errors import Notice
from hbf.nn.context import Context
from hbf.nn.hyperbf import HyperBFAttention, HyperBFCenters
from hbf.ops.normalization import normalize
from hbf.options import OptionError

B, N, D = 2, 5, 8
TRAIN = Context(train=True)
ATTENTION = {
  'heads': 2,
  'kernel': 'gaussian',
  'metric': 'identity',
  'rank': 3,
  'sigma_per': 'head',
  'sigma_scale': 1.0,
  'qk_norm': False,
  'memory': 0,
}
UNIT = {
  'centers': 6,
  'heads': 1,
  'kernel': 'gaussian',
  'metric': 'diagonal',
  'rank': 3,
  'sigma_per': 'center',
  'sigma_scale': 1.0,
  'normalize_inputs': False,
  'normalization': 'none',
  'centers_init': 'normal',
  'coefficients_scale': 1.0,
  'nested': False,
  'implementation': 'xla',
}


def make_tokens(shape=(B, N, D), seed=0):
  return jnp.asarray(reference.layer_norm(np.random.default_rng(seed).normal(size=shape)), jnp.float32)


def sigma(params, options, variance, h):
  """Return σ of head h as [1, A] or [1, 1]: the learned one, or the fixed one with this variance."""
  if options['sigma_per'] == 'fixed':
    return np.full((1, 1), variance**0.5)
  log_sigma = np.asarray(params['log_sigma'], np.float64)
  return np.exp(log_sigma[h if len(log_sigma) > 1 else 0])


def attention_reference(params, tokens, options):
  """Compute (Σ K v + Σ K c) / (Σ K + Σ K), memo eq. 6 with memory, head by head in float64."""
  heads, d = options['heads'], D // options['heads']
  tokens = np.asarray(tokens, np.float64)
  q, k, v = np.split(tokens @ params['qkv']['kernel'], 3, axis=-1)
  unit_norm = options['qk_norm']
  variance = options['sigma_scale'] * (options['rank'] if options['metric'] == 'low_rank' else d) ** 0.5
  variance /= d if unit_norm else 1
  joined = np.zeros(tokens.shape)
  for b, h in itertools.product(range(len(tokens)), range(heads)):
    part = slice(h * d, (h + 1) * d)
    points, keys, values = q[b, :, part], k[b, :, part], v[b, :, part]
    memory_keys, memory_values = np.zeros((0, d)), np.zeros((0, d))
    if options['memory']:
      memory_keys, memory_values = params['memory_centers'][h], params['memory_coefficients'][h]
    if unit_norm:
      points, keys, memory_keys = map(reference.norm_1, (points, keys, memory_keys))
    unit = {
      'kernel': options['kernel'],
      'sigma': sigma(params, options, variance, h),
      'metric': options['metric'],
      'weights': reference.head(params.get('metric'), h),
      'normalization': 'none',
    }
    over_data = reference.responses(points, keys, **unit)
    over_memory = reference.responses(points, memory_keys, **unit).reshape(len(points), -1)
    total = over_data.sum(-1, keepdims=True) + over_memory.sum(-1, keepdims=True)
    joined[b, :, part] = (over_data @ values + over_memory @ memory_values) / total
  return joined @ params['out']['kernel'] + params['out']['bias']


def unit_reference(params, tokens, options):
  """Compute Σ_h Σ_a R_a(y) c_a + b (memo eq. 7) in float64."""
  heads, d = options['heads'], D // options['heads']
  points = np.asarray(tokens, np.float64).reshape(-1, D)
  variance = options['sigma_scale'] * (options['rank'] if options['metric'] == 'low_rank' else d) ** 0.5
  variance /= d if options['normalize_inputs'] else 1
  out = np.tile(np.asarray(params['bias'], np.float64), (len(points), 1))
  for h in range(heads):
    x, t = points[:, h * d : (h + 1) * d], params['centers'][h]
    if options['normalize_inputs']:
      x, t = reference.norm_1(x), reference.norm_1(t)
    out += reference.hyperbf(
      x,
      t,
      params['coefficients'][h],
      kernel=options['kernel'],
      sigma=sigma(params, options, variance, h),
      metric=options['metric'],
      weights=reference.head(params.get('metric'), h),
      normalization=options['normalization'],
      log_gain=np.asarray(params['log_gain'])[h] if options['normalization'] == 'none' else 0.0,
    )
  return out.reshape(tokens.shape)


def assert_equals_reference(module, options, expected, tol=1e-3):
  tokens = make_tokens()
  params = random_params(module, tokens)
  result = apply(module, params, tokens)
  reference_ = expected(params, tokens, options)
  np.testing.assert_allclose(result, reference_, rtol=tol, atol=tol * np.abs(reference_).max())


@pytest.mark.parametrize(
  'changes',
  [
    *({'kernel': kernel} for kernel in reference.KERNELS),
    *({'metric': metric} for metric in reference.METRICS),
    *({'sigma_per': width, 'sigma_scale': 0.7} for width in ('fixed', 'layer', 'head')),
    {'qk_norm': True},
    {'memory': 3},
    {'memory': 3, 'qk_norm': True, 'metric': 'full', 'heads': 4},
    {'metric': 'low_rank', 'sigma_per': 'fixed', 'qk_norm': True, 'heads': 1},
  ],
  ids=str,
)
def test_attention_equals_the_formula(changes):
  options = ATTENTION | changes
  assert_equals_reference(HyperBFAttention(**options), options, attention_reference)


@pytest.mark.parametrize(
  'changes',
  [
    *({'kernel': kernel} for kernel in reference.KERNELS),
    *({'metric': metric} for metric in reference.METRICS),
    *({'sigma_per': width, 'sigma_scale': 0.7, 'heads': 2} for width in ('fixed', 'layer', 'head', 'center')),
    *({'normalization': n, 'heads': h} for n in reference.NORMALIZATIONS for h in (1, 2)),
    {'metric': 'low_rank', 'sigma_per': 'fixed', 'heads': 2, 'normalization': 'layer', 'kernel': 'laplacian'},
    *({'normalize_inputs': True, 'sigma_per': widths, 'heads': h} for widths in ('fixed', 'layer') for h in (1, 2)),
    {'normalize_inputs': True, 'metric': 'low_rank', 'normalization': 'layer', 'sigma_per': 'fixed'},
  ],
  ids=str,
)
def test_unit_equals_the_formula(changes):
  options = UNIT | changes
  assert_equals_reference(HyperBFCenters(**options), options, unit_reference)


def test_both_stages_call_the_one_operator(monkeypatch):
  """Each stage calls `hbf.ops.hyperbf.hyperbf` once. If it returns 0, only the bias is left of the output."""
  assert hbf.nn.hyperbf.hyperbf is hbf.ops.hyperbf.hyperbf
  tokens, attention, unit = make_tokens(), HyperBFAttention(**ATTENTION), HyperBFCenters(**UNIT)
  params = {module: random_params(module, tokens) for module in (attention, unit)}
  calls = []

  def nothing(points, centers, coefficients, basis, **options):
    calls.append(basis.kernel)
    return jnp.zeros((*points.shape[:-1], coefficients.shape[-1]), coefficients.dtype)

  monkeypatch.setattr(hbf.nn.hyperbf, 'hyperbf', nothing)
  out = attention.apply({'params': params[attention]}, tokens)
  np.testing.assert_array_equal(out, np.broadcast_to(params[attention]['out']['bias'], tokens.shape))
  assert len(calls) == 1
  out = unit.apply({'params': params[unit]}, tokens)
  np.testing.assert_array_equal(out, np.broadcast_to(params[unit]['bias'], tokens.shape))
  assert len(calls) == 2


def test_no_memory_tokens_leave_stage_1_as_it_is():
  tokens = make_tokens()
  with_memory = random_params(HyperBFAttention(**ATTENTION | {'memory': 3}), tokens)
  without = {name: z for name, z in with_memory.items() if not name.startswith('memory')}
  # Memory centers so far away that they never respond: the output is that of no memory at all.
  with_memory['memory_centers'] = with_memory['memory_centers'] + 1e3
  far = apply(HyperBFAttention(**ATTENTION | {'memory': 3}), with_memory, tokens)
  none = apply(HyperBFAttention(**ATTENTION), without, tokens)
  np.testing.assert_allclose(far, none, rtol=1e-5, atol=1e-6)
  assert set(jax.eval_shape(HyperBFAttention(**ATTENTION).init, jax.random.key(0), tokens)['params']) == set(without)


def test_memory_with_the_data_masked_out_is_normalized_stage_2():
  """If all keys are masked out, y = (ΣK v + ΣK c) / (ΣK + ΣK) is a normalized sum over the learned centers."""
  rng = np.random.default_rng(0)
  points, keys, values = (rng.normal(size=(N, D)).astype('f') for _ in range(3))
  centers, coefficients = (rng.normal(size=(3, D)).astype('f') for _ in range(2))
  only_memory = np.arange(N + 3) >= N
  unit = {'kernel': 'gaussian', 'sigma': 1.7}
  both = np.concatenate([keys, centers]), np.concatenate([values, coefficients])
  masked = hyperbf_plain(points, *both, mask=only_memory, **unit)
  stage2 = hyperbf(points, centers, coefficients, normalization='sum', **unit)
  np.testing.assert_allclose(masked, stage2, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize('memory', [0, 3])
def test_a_masked_token_is_as_one_that_is_not_there(memory):
  tokens, module = make_tokens(), HyperBFAttention(**ATTENTION | {'memory': memory})
  params = random_params(module, tokens)
  kept = jnp.array([0, 1, 4])
  mask = jnp.isin(jnp.arange(N), kept)
  out = apply(module, params, tokens, Context(mask=mask[None, None]))
  np.testing.assert_allclose(out[:, kept], apply(module, params, tokens[:, kept]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize('memory', [0, 3])
def test_a_causal_context_is_a_triangular_mask(memory):
  """All tokens see the learned centers."""
  tokens, module = make_tokens(), HyperBFAttention(**ATTENTION | {'memory': memory})
  params, triangle = random_params(module, tokens), jnp.tril(jnp.ones((N, N), bool))
  causal, masked = (apply(module, params, tokens, z) for z in (Context(causal=True), Context(mask=triangle)))
  np.testing.assert_allclose(causal, masked, rtol=1e-5, atol=1e-6)


def test_no_image_has_a_copy_of_the_learned_centers():
  """No array of a train step has an axis of images beside axes of learned centers and of dimensions."""
  tokens, module = make_tokens(), HyperBFAttention(**ATTENTION | {'memory': 11})
  params = jax.eval_shape(module.init, jax.random.key(0), tokens)['params']
  text = str(jax.make_jaxpr(jax.grad(lambda p: module.apply({'params': p}, tokens).sum()))(params))
  assert 'f32[2,11,4]' in text
  assert f'f32[{B},2,11,4]' not in text
  assert f'f32[{B},2,{N + 11},4]' not in text


def test_attention_commutes_with_a_permutation_of_the_tokens():
  tokens = make_tokens()
  module = HyperBFAttention(**ATTENTION | {'memory': 2, 'metric': 'full'})
  params = {'params': random_params(module, tokens)}
  order = np.random.default_rng(0).permutation(N)
  permuted = module.apply(params, tokens[:, order])
  np.testing.assert_allclose(permuted, module.apply(params, tokens)[:, order], rtol=1e-4, atol=1e-5)


def test_unit_norm_makes_attention_blind_to_the_scale_of_queries_and_keys():
  tokens = make_tokens()
  module = HyperBFAttention(**ATTENTION | {'qk_norm': True})
  params = random_params(module, tokens)
  scaled = jax.tree.map(np.array, params)
  scaled['qkv']['kernel'][:, : 2 * D] *= 5
  expected = apply(module, params, tokens)
  np.testing.assert_allclose(apply(module, scaled, tokens), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize('heads', [1, 2])
def test_tokens_as_centers_are_distinct_tokens_of_the_first_batch(heads):
  tokens = make_tokens()
  module = HyperBFCenters(**UNIT | {'centers_init': 'tokens', 'heads': heads})
  params = jax.jit(module.init)(jax.random.key(0), tokens)['params']
  seen = np.asarray(tokens).reshape(B * N, heads, D // heads)
  for h in range(heads):
    centers = {tuple(row) for row in np.asarray(params['centers'])[h]}
    assert len(centers) == UNIT['centers']
    assert centers <= {tuple(row) for row in seen[:, h]}


def test_kmeans_centers_quantize_better_than_sampled_tokens_and_are_deterministic():
  tokens = make_tokens((4, 10, D))

  def centers(init):
    return HyperBFCenters(**UNIT | {'centers_init': init}).init(jax.random.key(1), tokens)['params']['centers'][0]

  def quantization_error(means):
    return reference.squared_distances(tokens.reshape(-1, D), means).min(-1).mean()

  means = centers('kmeans')
  assert quantization_error(means) < 0.9 * quantization_error(centers('tokens'))
  np.testing.assert_array_equal(means, centers('kmeans'))


def responses_at_init(options, tokens, params=None):
  """Return the responses [H, B N, A] of a new stage 2, from its parameters."""
  params = params or HyperBFCenters(**options).init(jax.random.key(0), tokens)['params']
  points = tokens.reshape(-1, options['heads'], tokens.shape[-1] // options['heads']).swapaxes(0, 1)
  centers = params['centers']
  if options['normalize_inputs']:
    points, centers = (jnp.asarray(reference.norm_1(z), jnp.float32) for z in (points, centers))
  log_k = log_responses(
    points,
    centers,
    kernel=options['kernel'],
    sigma=jnp.exp(params['log_sigma']),
    metric=options['metric'],
    weights=params.get('metric'),
  )
  return np.asarray(normalize(log_k, options['normalization'], params.get('log_gain', 0.0)), np.float64)


@pytest.mark.parametrize(
  'changes',
  [
    *({'kernel': kernel} for kernel in reference.KERNELS),
    {'centers_init': 'tokens'},
    {'centers_init': 'tokens', 'normalize_inputs': True},
  ],
  ids=str,
)
def test_mean_response_of_every_head_is_one_at_init(changes):
  options = UNIT | {'heads': 2, 'sigma_scale': 0.5} | changes
  responses = responses_at_init(options, make_tokens((2, 8, 64)))
  np.testing.assert_allclose(responses.mean(axis=(1, 2)), 1, rtol=1e-3)


def test_with_norm_unit_neither_the_size_of_a_token_nor_that_of_a_center_counts():
  module, tokens = HyperBFCenters(**UNIT | {'normalize_inputs': True}), make_tokens()
  params = random_params(module, tokens)
  expected = apply(module, params, tokens)
  larger = params | {'centers': params['centers'] * np.arange(1, 7)[:, None]}
  np.testing.assert_allclose(apply(module, larger, 3 * tokens), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize('heads,scale', [(1, 1.0), (2, 0.1)])
@pytest.mark.parametrize('normalization', reference.NORMALIZATIONS)
def test_output_at_init_has_the_scale_asked_for(normalization, heads, scale):
  options = UNIT | {'normalization': normalization, 'heads': heads, 'coefficients_scale': scale, 'centers': 48}
  tokens = make_tokens((2, 8, 64))
  out, _ = jax.jit(HyperBFCenters(**options).init_with_output)(jax.random.key(0), tokens)
  np.testing.assert_allclose(np.sqrt(np.mean(np.square(out))), scale, rtol=0.15)


@pytest.mark.filterwarnings('ignore:.*tokens that are all equal')
@pytest.mark.parametrize(
  ('what', 'normalization'),
  [
    *(('equal tokens', normalization) for normalization in reference.NORMALIZATIONS),
    *(('one center', normalization) for normalization in reference.NORMALIZATIONS if normalization != 'layer'),
  ],
)
def test_coefficients_are_finite_where_all_responses_are_equal(what, normalization):
  """With zero mean, equal responses become 0. Then no coefficients could give the output its scale."""
  tokens = make_tokens((2, 8, 64))
  options = UNIT | {'normalization': normalization, 'centers_init': 'tokens'}
  if what == 'one center':
    options |= {'centers': 1}
  else:
    tokens = jnp.broadcast_to(tokens[:1, :1], tokens.shape)
  params = HyperBFCenters(**options).init(jax.random.key(0), tokens)['params']
  assert all(np.all(np.isfinite(z)) for z in jax.tree.leaves(params))
  assert np.abs(params['coefficients']).max() < 10 * options['coefficients_scale'] * options['centers']


def test_fact_4_the_default_start_is_neither_dead_nor_constant():
  """For D = 384, σ² = 1 gives responses of exactly 0, σ² = D a relative spread of 0.05, and the default neither."""
  tokens = make_tokens((2, 16, 384))
  options = UNIT | {'centers': 64}
  module = HyperBFCenters(**options)
  params = jax.jit(module.init)(jax.random.key(0), tokens)['params']
  responses = responses_at_init(options, tokens, params)
  np.testing.assert_allclose(responses.mean(), 1, rtol=1e-3)
  assert responses.std() > 0.5
  target = make_tokens((2, 16, 384), seed=1)
  gradient = jax.jit(jax.grad(lambda p: jnp.mean(jnp.square(module.apply({'params': p}, tokens) - target))))(params)
  # A step that moves every parameter by a hundredth of its size changes the loss by this much.
  for name in ('centers', 'coefficients', 'metric', 'log_sigma', 'log_gain'):
    reach = 0.01 * jnp.linalg.norm(gradient[name]) * jnp.maximum(jnp.linalg.norm(params[name]), 1)
    assert reach > 1e-4, name


@pytest.mark.parametrize('metric', reference.METRICS)
def test_metric_starts_as_the_identity_or_keeps_the_variance(metric):
  tokens = make_tokens((2, 8, 256))
  module = HyperBFCenters(**UNIT | {'metric': metric, 'rank': 200})
  params = jax.jit(module.init)(jax.random.key(0), tokens)['params']
  if metric == 'identity':
    assert 'metric' not in params
  elif metric == 'low_rank':
    mapped = np.asarray(tokens).reshape(-1, 256) @ np.asarray(params['metric'][0]).T
    np.testing.assert_allclose(mapped.std(), 1, rtol=0.1)
  else:
    np.testing.assert_array_equal(params['metric'][0], np.ones(256) if metric == 'diagonal' else np.eye(256))


@pytest.mark.parametrize('width,shape', [('layer', (1, 1, 1)), ('head', (2, 1, 1)), ('center', (2, 1, 6))])
def test_widths_are_shared_as_far_as_asked(width, shape):
  params = HyperBFCenters(**UNIT | {'sigma_per': width, 'heads': 2}).init(jax.random.key(0), make_tokens())['params']
  assert params['log_sigma'].shape == shape
  np.testing.assert_allclose(np.exp(2 * params['log_sigma']), (D / 2) ** 0.5, rtol=1e-5)


def test_the_signed_gaussian_has_a_free_beta_of_every_center():
  """Stage 2 is Σ_a exp(−β_a r²) c_a + b with β of any sign, as in the authors' code."""
  options = UNIT | {'kernel': 'signed_gaussian', 'metric': 'bilinear'}
  module, tokens = HyperBFCenters(**options), make_tokens()
  start = module.init(jax.random.key(0), tokens)['params']['beta']
  np.testing.assert_allclose(start, np.full((1, 1, 6), 0.5 / D**0.5), rtol=1e-6)
  params = random_params(module, tokens)
  params['beta'] = np.array([[[-0.05, -0.01, 0.0, 0.01, 0.1, 1.0]]], np.float32)
  points = np.asarray(tokens).reshape(-1, D)
  r2 = reference.squared_distances(points, params['centers'][0], 'bilinear', params['metric'][0])
  responses = np.exp(params['log_gain'] - params['beta'] * r2)[0]
  expected = responses @ params['coefficients'][0] + params['bias']
  result = np.asarray(apply(module, params, tokens)).reshape(-1, D)
  np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-5)


def test_a_fixed_width_is_not_learned():
  for module in (
    HyperBFCenters(**UNIT | {'sigma_per': 'fixed'}),
    HyperBFAttention(**ATTENTION | {'sigma_per': 'fixed'}),
  ):
    assert 'log_sigma' not in module.init(jax.random.key(0), make_tokens())['params']


@pytest.mark.parametrize('module', [HyperBFAttention(**ATTENTION), HyperBFCenters(**UNIT)], ids=['stage1', 'stage2'])
def test_dtype_is_that_of_the_output_not_of_the_parameters(module):
  """The option dtype is the type of the products and the output, also for float32 tokens."""
  half = module.clone(dtype=jnp.bfloat16)
  params = half.init(jax.random.key(0), make_tokens())['params']
  assert {z.dtype for z in jax.tree.leaves(params)} == {jnp.dtype('float32')}
  out = apply(half, params, make_tokens())
  assert out.dtype == jnp.bfloat16
  expected = np.asarray(apply(module, params, make_tokens()))
  np.testing.assert_allclose(np.asarray(out, np.float32), expected, atol=0.05 * np.abs(expected).max())


@pytest.mark.parametrize(
  'kind,options,message',
  [
    (HyperBFAttention, ATTENTION | {'heads': 3}, 'a width of 8 is not divisible by 3 heads'),
    (HyperBFCenters, UNIT | {'heads': 3}, 'a width of 8 is not divisible by 3 heads'),
    (HyperBFCenters, UNIT | {'heads': 0}, 'heads is 0: expected a whole number of 1 or more'),
    (HyperBFCenters, UNIT | {'sigma_scale': -1.0}, 'sigma_scale is -1.0: expected a number above 0'),
    (HyperBFAttention, ATTENTION | {'sigma_per': 'center'}, "unknown sigma_per 'center': known: fixed, head, layer"),
    (
      HyperBFCenters,
      UNIT | {'kernel': 'signed_gaussian'},
      'kernel signed_gaussian needs metric bilinear, not diagonal',
    ),
    (HyperBFAttention, ATTENTION | {'kernel': 'gausian'}, "did you mean 'gaussian'"),
    (HyperBFAttention, ATTENTION | {'metric': 'ful'}, "did you mean 'full'"),
    (HyperBFAttention, ATTENTION | {'qk_norm': 'units'}, 'qk_norm is .units.: expected True or False'),
    (HyperBFAttention, ATTENTION | {'metric': 'low_rank', 'rank': 5}, 'from 1 to 4'),
    (HyperBFCenters, UNIT | {'metric': 'low_rank', 'rank': 0}, 'from 1 to 8'),
    (HyperBFCenters, UNIT | {'sigma_per': 'centre'}, "did you mean 'center'"),
    (HyperBFCenters, UNIT | {'normalization': 'layr'}, "did you mean 'layer'"),
    (HyperBFCenters, UNIT | {'centers_init': 'token'}, "did you mean 'tokens'"),
    (
      HyperBFCenters,
      UNIT | {'nested': True, 'implementation': 'pallas'},
      'nested .* implementation must be xla or plain, not pallas',
    ),
    (HyperBFCenters, UNIT | {'coefficients': 'linear', 'implementation': 'pallas'}, 'linear .* not pallas'),
    (
      HyperBFCenters,
      UNIT | {'kernel': 'wendland', 'normalization': 'none', 'implementation': 'pallas'},
      'kernel wendland has no fused form: .* not pallas',
    ),
    (HyperBFCenters, UNIT | {'centers': 1, 'normalization': 'layer'}, 'layer needs two centers or more'),
  ],
)
def test_impossible_options_are_errors(kind, options, message):
  with pytest.raises(OptionError, match=message):
    jax.eval_shape(kind(**options).init, jax.random.key(0), make_tokens())


def test_nested_centers_may_have_the_implementation_plain():
  options = UNIT | {'nested': True, 'implementation': 'plain'}
  jax.eval_shape(HyperBFCenters(**options).init, jax.random.key(0), make_tokens())


def nested_outputs(normalization):
  """Return a nested stage 2, parameters, and the outputs [A, B, N, D] of the first 1, 2, … centers."""
  options = UNIT | {'nested': True, 'normalization': normalization}
  params = random_params(HyperBFCenters(**options), make_tokens())
  outputs = []
  for count in range(1, UNIT['centers'] + 1):
    first = {name: z[:, :count] if name in ('centers', 'coefficients') else z for name, z in params.items()}
    first['log_sigma'] = params['log_sigma'][..., :count]
    fewer = HyperBFCenters(**UNIT | {'normalization': normalization, 'centers': count})
    outputs.append(apply(fewer, first, make_tokens()))
  return HyperBFCenters(**options), params, np.asarray(outputs)


@pytest.mark.parametrize('normalization', reference.NORMALIZATIONS)
def test_in_training_a_nested_unit_is_one_of_its_first_centers_for_every_image(normalization):
  module, params, outputs = nested_outputs(normalization)
  train = jax.jit(lambda key: module.apply({'params': params}, make_tokens(), TRAIN, rngs={'dropout': key}))
  counts = []
  for seed in range(5):
    out = train(jax.random.key(seed))
    differences = np.abs(outputs - np.asarray(out)).max(axis=(2, 3))  # [A, B]
    assert (differences.min(axis=0) < 1e-3 * np.abs(outputs).max()).all()
    counts.append(differences.argmin(axis=0))
  assert any(len(set(count)) > 1 for count in counts), 'images draw together'
  evaluated = apply(module, params, make_tokens(), rngs={'dropout': jax.random.key(0)})
  np.testing.assert_allclose(evaluated, outputs[-1], rtol=1e-3, atol=1e-4)


def test_nested_units_take_all_centers_for_half_of_the_images_and_each_doubling_as_often():
  """All 8 centers respond for half of the images. The other images are divided into three equal parts.

  In these parts, the first 1 to 2, 2 to 4, and 4 to 8 centers respond.
  """
  module = HyperBFCenters(**UNIT | {'nested': True, 'centers': 8, 'normalization': 'sum'})
  params = random_params(module, make_tokens())
  # Coefficients that count: with equal responses the output is the mean of 1 … n, (n + 1) / 2.
  params |= {'centers': np.zeros((1, 8, D), 'f'), 'log_sigma': np.full((1, 1, 8), 5.0, 'f'), 'bias': np.zeros(D, 'f')}
  params['coefficients'] = np.tile(np.arange(1, 9, dtype='f')[:, None], (1, 1, D))

  def draw(key):
    return module.apply({'params': params}, make_tokens(), TRAIN, rngs={'dropout': key})[0, 0, 0]

  means = jax.jit(jax.vmap(draw))(jax.random.split(jax.random.key(0), 3000))
  counts = np.round(2 * np.asarray(means) - 1)
  shares = [np.mean((low < counts) & (counts <= high)) for low, high in ((1, 2), (2, 4), (4, 7), (7, 8))]
  # From 7 to 8 is log2(8/7) of a doubling, which counts as 8.
  rest = np.log2(8 / 7) / 6
  np.testing.assert_allclose(shares, [1 / 6, 1 / 6, 1 / 6 - rest, 1 / 2 + rest], atol=0.03)


@pytest.mark.parametrize('centers_init', ['tokens', 'kmeans'])
def test_equal_tokens_at_initialization_give_a_warning_because_all_centers_would_be_equal(centers_init):
  module = HyperBFCenters(4, centers_init=centers_init)
  with pytest.warns(Notice, match='HyperBFCenters was initialized with tokens that are all equal'):
    module.init(jax.random.key(0), jnp.ones((B, N, D)))


def test_different_tokens_at_initialization_give_no_warning():
  with warnings.catch_warnings():
    warnings.simplefilter('error')
    for module in (HyperBFCenters(4), HyperBFCenters(4, centers_init='normal')):
      module.init(jax.random.key(0), make_tokens())
    HyperBFCenters(4, centers_init='normal').init(jax.random.key(0), jnp.ones((B, N, D)))
