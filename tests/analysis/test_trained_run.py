"""Tests of captured activations, centers, heads and sigmas against direct computations."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ops.keywords import log_responses

from hbf.analysis import centers as analysis_centers
from hbf.analysis.capture import capture
from hbf.analysis.centers import (
  census,
  class_scores,
  coefficient_gradients,
  overlap,
  project_centers,
  purity,
  random_tokens,
)
from hbf.analysis.heads import heads, maps, patch_distances, token_differences
from hbf.analysis.nearness import image_nearness
from hbf.analysis.report.page import Gallery, render
from hbf.analysis.report.sections import attention, centers, relevance
from hbf.analysis.report.sections.centers import crops
from hbf.analysis.report.sections.relevance import strongest
from hbf.analysis.sigmas import summarize_sigmas
from hbf.analysis.weights import attention_weights
from hbf.errors import UserError
from hbf.models.build import abstract_params
from hbf.ops.normalization import normalize


def captured(run, images):
  (number, seen), *more = run.capture_batches(images)
  assert not more
  return jax.tree.map(np.asarray, seen), number >= 0


def inputs_of(stage, run, images, block):
  """Return the tokens [n, N, D] that a stage of a block gets."""
  forward = jax.jit(lambda p, x: run.model.apply({'params': p}, x, train=False, capture_intermediates=True)[1])
  kept = forward(run.params, run.normalized(images))['intermediates']
  return np.asarray(kept[block][f'norm_{stage}']['__call__'][0])


def log_kernels(run, images, block):
  """Return log K [n, N, U] of every token and center, stage 2's inputs, and the parameters of stage 2."""
  points = inputs_of('stage2', run, images, block)
  unit = run.params[block]['stage2']
  how = {'kernel': 'gaussian', 'sigma': jnp.exp(unit['log_sigma']), 'metric': 'diagonal', 'weights': unit['metric']}
  log_k = log_responses(points.reshape(1, -1, points.shape[-1]), unit['centers'], **how)
  return np.asarray(log_k)[0].reshape(*points.shape[:2], -1), points, unit


def test_logits_are_those_of_the_whole_and_of_the_last_tokens(run, images):
  seen, real = captured(run, images)
  apply = jax.jit(functools.partial(run.model.apply, train=False))
  expected = np.asarray(apply({'params': run.params}, run.normalized(images)))
  np.testing.assert_allclose(run.logits(images), expected, rtol=1e-5, atol=1e-5)
  np.testing.assert_allclose(seen.logits[real], expected, rtol=1e-5, atol=1e-5)
  head = run.params['head']
  np.testing.assert_allclose(seen.features[real] @ head['kernel'] + head['bias'], expected, rtol=1e-4, atol=1e-4)
  assert len(seen.tokens) == 3


def test_a_run_with_other_parameters_needs_no_other_program(run, images, monkeypatch):
  before = run.logits(images)
  scaled = run.with_params(jax.tree.map(lambda z: 1.5 * z, run.params))
  monkeypatch.setattr(type(run.model), '__call__', None)  # a second trace of the network would fail
  after = scaled.logits(images)
  assert before.shape == after.shape and not np.allclose(before, after)


def test_nearest_patches_are_those_of_brute_force(run, images):
  found = census(run, images, nearest=3)
  for block in ('block0', 'block1'):
    log_k, points, _ = log_kernels(run, images, block)
    per_image = log_k.max(axis=1)  # each image once
    nearest = np.argsort(-per_image, axis=0, kind='stable')[:3].T
    np.testing.assert_array_equal(found[block].images, nearest)
    tokens = np.take_along_axis(log_k.argmax(axis=1).T, nearest, axis=1)
    np.testing.assert_array_equal(found[block].tokens, tokens)
    share = np.exp(log_k - log_k.max(-1, keepdims=True))
    share /= share.sum(-1, keepdims=True)
    units = log_k.shape[-1]
    np.testing.assert_allclose(found[block].rate, (share >= 2 / units).mean((0, 1)), atol=2e-3)
    np.testing.assert_allclose(found[block].awake, (1 / (share**2).sum(-1)).mean(), rtol=1e-3)
    r = np.asarray(normalize(jnp.asarray(log_k), 'layer')).reshape(-1, units)
    np.testing.assert_allclose(found[block].mean, r.mean(0), rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(found[block].deviation, r.std(0), rtol=1e-2, atol=1e-4)
    near = r.reshape(log_k.shape)[nearest, tokens, np.arange(units)[:, None]]
    np.testing.assert_allclose(found[block].responses, near, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(found[block].correlation, np.corrcoef(r.T), atol=2e-2)
    moved = project_centers(run, images, found)[block]['stage2']['centers'][0]
    np.testing.assert_allclose(moved, points[nearest[:, 0], tokens[:, 0]], rtol=1e-5, atol=1e-5)
  np.testing.assert_allclose(
    image_nearness(run, images)['block1'], log_kernels(run, images, 'block1')[0].max(-1).mean(-1), rtol=1e-4
  )


def test_what_fills_the_last_batch_up_counts_nowhere(made, images, monkeypatch):
  whole = made()
  parts = made()
  monkeypatch.setattr('hbf.analysis.trained_run.BATCH', 5)
  one, other = census(whole, images)['block0'], census(parts, images)['block0']
  np.testing.assert_array_equal(one.images, other.images)
  np.testing.assert_allclose(one.mean, other.mean, rtol=1e-4, atol=1e-5)
  np.testing.assert_allclose(one.rate, other.rate, atol=2e-3)
  np.testing.assert_allclose(whole.logits(images), parts.logits(images), rtol=1e-5, atol=1e-5)


def test_dead_constant_and_doubled_centers_are_found(made, images):
  run = made(**{'model.stage2.normalization': 'none', 'model.stage2.sigma_per': 'center'})
  unit = run.params['block0']['stage2']
  centers, log_sigma = np.array(unit['centers']), np.array(unit['log_sigma'])
  centers[0, 0] = 50  # far from all
  centers[0, 2] = centers[0, 1]
  log_sigma[..., 2] = log_sigma[..., 1]
  log_sigma[..., 3] = 8  # so wide that its response is constant
  run.params['block0']['stage2'] |= {'centers': jnp.asarray(centers), 'log_sigma': jnp.asarray(log_sigma)}
  found = census(run, images)['block0']
  assert np.flatnonzero(found.health.dead).tolist() == [0] and found.low_share[0] and found.doubled[2]
  assert found.health.constant[3] and not found.doubled[1] and not found.health.constant[:3].any()


def test_a_share_says_nothing_of_life(made, images):
  """Units whose responses are all 0 can have a high share. A unit beside wider ones has a low share but is alive."""
  run = made(**{'model.stage2.normalization': 'none', 'model.stage2.sigma_per': 'center'})
  last, first = run.params['block1']['stage2'], run.params['block0']['stage2']
  last['log_gain'] -= 1e4
  first['log_sigma'] = jnp.asarray(first['log_sigma']).at[..., :6].set(8.0)  # half of the centers are wide: K = 1
  first['log_gain'] += 5
  found = census(run, images)
  assert found['block1'].health.dead.all() and not found['block1'].low_share.all()
  assert not found['block0'].health.dead.any() and found['block0'].low_share[6:].all()


def test_a_center_whose_coefficients_learn_nothing_is_dead(made, images):
  run = made(**{'model.layer_scale': 1.0})
  run.params['block1']['scale_stage2'] *= 0
  labels = np.arange(len(images)) % 10
  found = census(run, images, labels=labels)
  assert found['block1'].health.dead.all() and not found['block0'].health.dead.any()
  assert not census(run, images)['block1'].health.dead.any()  # the responses are those of a live unit
  gradient = coefficient_gradients(run, images, labels)['block0']

  def loss(coefficients):
    unit = run.params['block0']['stage2'] | {'coefficients': coefficients}
    params = run.params | {'block0': run.params['block0'] | {'stage2': unit}}
    log_p = jax.nn.log_softmax(run.model.apply({'params': params}, run.normalized(images), train=False))
    return -log_p[np.arange(16), labels].mean()

  expected = jax.jit(jax.grad(loss))(run.params['block0']['stage2']['coefficients'])
  np.testing.assert_allclose(gradient, np.abs(expected).max(-1).ravel(), rtol=1e-3, atol=1e-7)


def test_purity_and_overlap(run, images):
  one, other = census(run, images, 4), census(run, images[::-1], 4)
  labels = np.arange(16) % 2
  expected = [max(row.sum(), 4 - row.sum()) / 4 for row in labels[one['block0'].images]]
  np.testing.assert_allclose(purity(labels, one['block0']), expected)
  assert overlap(one['block0'], one['block0']).min() == 1
  mirrored = 15 - other['block0'].images
  shared = [len({*a} & {*b}) / 4 for a, b in zip(one['block0'].images, mirrored, strict=True)]
  assert min(shared) >= 0.75  # rounding may exchange the last


def test_few_images_are_all_found(run, images):
  """Copies of the last image fill up the batch, but they are no images."""
  found = census(run, images[:3], nearest=9)
  nulls = random_tokens(run, images[:3], found, nearest=9)
  for block in found:
    assert (np.sort(found[block].images) == np.arange(3)).all()
    assert nulls[block].images.shape == (12, 2) and nulls[block].images.min() >= 0


def test_random_tokens_have_their_own_image_left_out(run, images):
  """Every image occurs twice. So the nearest token of another image is in the copy, at distance 0."""
  twice = np.concatenate([images[:8], images[:8]])
  found = census(run, twice, nearest=4)
  nulls = random_tokens(run, twice, found, nearest=4)
  for block, null in nulls.items():
    np.testing.assert_allclose(null.log_kernels[:, 0], 0, atol=1e-4)
    assert (null.log_kernels[:, 1] < -1e-3).all() and null.images.shape == found[block].images.shape
  assert len(set(nulls['block0'].images[:, 0])) > 1


def test_an_untrained_network_is_one_of_its_shape(run, images):
  start, other = run.untrained(0), run.untrained(1)
  assert jax.tree.map(jnp.shape, start.params) == jax.tree.map(jnp.shape, run.params)
  assert not np.allclose(start.logits(images), other.logits(images))
  assert not np.asarray(start.params['head']['bias']).any() and np.asarray(run.params['head']['bias']).any()


def test_scores_are_the_same_if_responses_and_coefficients_change_their_signs(made, images):
  run = made(**{'model.stage2.coefficients': 'linear', 'model.stage2.normalization': 'none'})
  unit = run.params['block1']['stage2']
  turned = unit | {name: -unit[name] for name in ('slopes', 'slope_bias', 'coefficients')}
  other = run.with_params(run.params | {'block1': run.params['block1'] | {'stage2': turned}})
  np.testing.assert_allclose(other.logits(images), run.logits(images), rtol=1e-4, atol=1e-5)
  one, two = (class_scores(z, 'block1', census(z, images)['block1']) for z in (run, other))
  np.testing.assert_allclose(one, two, atol=1e-6)


def test_scores_of_a_center_before_a_merge_are_means_over_the_four_tokens_that_become_one(merged):
  found = census(merged, merged.test.images[:16])['block0']
  near = np.argmax(found.responses.mean(axis=1) - found.mean)
  added = np.asarray(merged.params['block0']['stage2']['coefficients'][0, near], np.float64)
  scores = np.zeros(10)
  for place in range(4):
    x = np.zeros(4 * 16)
    x[16 * place : 16 * (place + 1)] = added
    for norm, dense in (('norm_merge1', 'merge1'), ('norm', 'head')):
      x = (x - x.mean()) * np.asarray(merged.params[norm]['scale']) @ np.asarray(merged.params[dense]['kernel'])
    scores += x / 4
  expected = scores - scores.mean()
  np.testing.assert_allclose(class_scores(merged, 'block0', found)[near], expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize('changes', [{}, {'model.layer_scale': 0.5}, {'model.merge': (1,), 'model.pool': 'mean'}])
def test_what_a_center_writes_is_what_the_head_reads(made, images, changes):
  run = made(**changes)
  block, norm, head = run.params['block1'], run.params['norm'], run.params['head']
  found = census(run, images)['block1']
  near = np.argmax(found.responses.mean(axis=1) - found.mean)  # a center that responds to near tokens
  c = np.asarray(block['stage2']['coefficients'][0, near], np.float64) * np.asarray(block.get('scale_stage2', 1.0))
  logits = (c - c.mean()) * np.asarray(norm['scale']) @ np.asarray(head['kernel'])
  scores = class_scores(run, 'block1', found)
  np.testing.assert_allclose(scores[near], logits - logits.mean(), rtol=1e-5, atol=1e-6)


def test_crops_show_the_patch_in_the_middle(run, images):
  for token in (1, 6, 16):  # behind the class token: a corner, one inside, the other corner
    row, column = divmod(token - 1, 4)
    cut = crops(run, 'block0', images, np.array([0]), np.array([token]))[0]
    assert cut.shape == (6, 6, 3)
    np.testing.assert_array_equal(cut[2:4, 2:4, :1], images[0, 2 * row : 2 * row + 2, 2 * column : 2 * column + 2])
  assert (crops(run, 'block0', images, np.array([0]), np.array([1]))[0][:2] == 128).all()  # beyond the image
  corner = crops(run, 'block0', images, np.array([0]), np.array([1]), around=0)[0]
  many = np.broadcast_to(images[0], (10**9, *images[0].shape))  # cut without a copy of the images
  np.testing.assert_array_equal(crops(run, 'block0', many, np.full(3, 10**9 - 1), np.ones(3, int), 0)[2], corner)


def test_the_whole_image_is_shown_for_a_class_token(run, images):
  whole, wide = images[:1].copy(), np.zeros((1, 4, 8, 1), np.uint8)
  whole[:, :4], whole[:, 4:], wide[:, :, 4:] = 0, 255, 255
  upright = crops(run, 'block0', whole, np.array([0]), np.array([0]))[0]  # 8 × 8 pixels become 6 × 6
  assert upright.shape == (6, 6, 3) and (upright[:2] < 30).all() and (upright[-2:] > 225).all()
  flat = crops(run, 'block0', wide, np.array([0]), np.array([0]))[0]
  assert (flat[0] == 128).all() and (flat[-2:] == 128).all() and flat[2, 0, 0] < 30 and flat[2, -1, 0] > 225
  assert 'class token' in centers.about_class_token(run)


def test_sums_and_tokens_of_several_batches_are_those_of_one(run, images, monkeypatch):
  whole, parts_of = census(run, images), []
  projected = project_centers(run, images, whole)
  batched = dataclasses.replace(run)
  batched.__dict__['_batch'] = 5
  combine = analysis_centers._census
  monkeypatch.setattr(
    analysis_centers, '_census', lambda parts, *rest: parts_of.extend(parts) or combine(parts, *rest)
  )
  found = census(batched, images)
  assert len(parts_of) == 8 and not any('products' in part for part in parts_of)  # [U, U] is kept once for a block
  for block in whole:
    np.testing.assert_allclose(found[block].correlation, whole[block].correlation, atol=1e-4)
    np.testing.assert_array_equal(found[block].images, whole[block].images)
  moved = project_centers(batched, images, whole)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), moved, projected)


def test_noise_is_made_image_by_image():
  draws = np.random.default_rng(1).integers(0, 256, (6, 4, 4, 3)).astype(np.uint8)
  noise = np.random.default_rng(0).normal(0, centers.NOISE, draws.shape)
  np.testing.assert_array_equal(centers._noisy(draws), np.clip(np.rint(draws + noise), 0, 255))


def test_tokens_behind_a_merge_stand_for_larger_patches(merged, images):
  assert [merged.patches_of(f'block{i}') for i in range(2)] == [(4, 4, 2), (2, 2, 4)]
  corner = crops(merged, 'block1', images, np.array([0]), np.array([1]), around=0)[0]
  np.testing.assert_array_equal(corner[..., :1], images[0, :4, 4:])
  seen, real = captured(merged, images)
  assert [z[real].shape for z in seen.tokens] == [(16, 16, 16), (16, 16, 16), (16, 4, 32)]
  assert {block: z[real].shape for block, z in seen.points.items()} == {'block0': (16, 16, 16), 'block1': (16, 4, 32)}
  assert [w.shape for w in maps(merged, images[:3]).values()] == [(3, 2, 4, 4), (3, 2, 2, 2)]
  assert patch_distances(merged, 'block1').max() == np.sqrt(2)
  galleries = [part for part in attention.section(merged).parts if isinstance(part, Gallery)]
  assert len(galleries) == 3
  assert [label for _, label in galleries[0].images] == ['query patch', 'block0', 'query patch', 'block1']
  found = heads(merged, images)
  assert 1 < found['block1'].tokens.max() <= 4 < found['block0'].tokens.max() <= 16
  moved = merged.with_params(project_centers(merged, images, census(merged, images)))
  np.testing.assert_allclose(census(moved, images)['block0'].log_kernels[:, 0], 0, atol=1e-4)  # later tokens change


def test_heads_are_described_by_their_weights(run, images):
  found = heads(run, images)
  weights = attention_weights(run.model, run.params, run.normalized(images))
  assert list(found) == ['block0', 'block1']
  away = patch_distances(run, 'block1')
  assert away[0, 5] == np.sqrt(2) and away[0, 3] == 3
  w = np.asarray(weights['block1'], np.float64)
  entropy = -(w * np.log(w)).sum(-1)
  np.testing.assert_allclose(found['block1'].tokens, np.exp(entropy).mean((0, 2)), rtol=1e-4)
  patches = w[:, :, 1:, 1:] / w[:, :, 1:, 1:].sum(-1, keepdims=True)
  np.testing.assert_allclose(found['block1'].distance, (patches * away).sum(-1).mean((0, 2)), rtol=1e-4)
  for query, token in (('middle', 11), ('class', 0)):  # the class token, then patches in rows of four
    shown = maps(run, images[3:5], query)['block1'][0]
    np.testing.assert_allclose(shown, w[3, :, token, 1:].reshape(2, 4, 4), rtol=1e-3, atol=1e-6)


def test_tokens_that_are_alike_do_not_differ(run, images):
  seen, real = captured(run, images)
  x = np.stack(seen.tokens)[:, real].astype(np.float64)
  expected = np.linalg.norm(x - x.mean(2, keepdims=True), axis=(2, 3)) / np.linalg.norm(x, axis=(2, 3))
  np.testing.assert_allclose(token_differences(run, images), expected.mean(1), rtol=1e-5)


def test_sigmas_are_summarized_with_their_values_at_init(made, images):
  run = made(**{'model.stage1.sigma_per': 'layer', 'model.layer_scale': 0.5})
  found = summarize_sigmas(run, images)
  unit = run.params['block0']['stage2']
  here = found['block0']['stage2']
  np.testing.assert_allclose(here.sigma, np.exp(unit['log_sigma']).ravel(), rtol=1e-5)
  assert here.sigma_init == pytest.approx(np.sqrt(0.5 * 16**0.5))
  assert found['block0']['stage1'].sigma_init == pytest.approx(np.sqrt(8**0.5))
  log_k, _, _ = log_kernels(run, images, 'block0')
  squares = -log_k * 2 * np.exp(2 * np.asarray(unit['log_sigma'][0]))
  assert here.distance == pytest.approx(np.sqrt(squares.mean()), rel=1e-3)
  w = np.asarray(unit['metric'], np.float64)[0]
  assert here.metric == pytest.approx(np.linalg.norm(np.diag(w**2 - 1)) / 4, rel=1e-4)
  assert found['block0']['stage1'].metric is None
  tokens = inputs_of('stage1', run, images, 'block0').astype(np.float64)
  q, k, _ = np.split(tokens @ run.params['block0']['stage1']['qkv']['kernel'], 3, axis=-1)
  squares = ((q[:, :, None] - k[:, None]) ** 2).sum(-1) / 2  # the mean over two heads
  assert found['block0']['stage1'].distance == pytest.approx(np.sqrt(squares.mean()), rel=1e-3)


def test_a_model_without_centers_or_kernels_has_none(made, images):
  mixer = made('model=mixer')
  assert census(mixer, images) == {} and image_nearness(mixer, images) == {} and summarize_sigmas(mixer, images) == {}
  assert heads(mixer, images) == {}


def test_maps_of_positions_alone_are_shown_once(made):
  parts = attention.section(made('model=positional')).parts
  assert len([part for part in parts if isinstance(part, Gallery)]) == 1
  assert parts[-1].text.endswith('All images have the same maps.')


def test_blocks_come_in_their_order(run):
  model, found = run.model.clone(trunk=run.model.trunk.clone(depth=11)), []

  def see(params, images):
    found.extend([capture(model, params, images).points, attention_weights(model, params, images)])

  shapes = abstract_params(model, run.task.shape), jax.ShapeDtypeStruct((1, *run.task.shape), jnp.float32)
  jax.eval_shape(see, *shapes)  # nothing is compiled
  assert list(found[0]) == list(found[1]) == [f'block{i}' for i in range(11)]


def test_windows_have_no_attention_weights_and_all_else(made, images):
  run = made(**{'model.window': 2, 'model.pool': 'mean'})
  assert list(census(run, images)) == ['block0', 'block1'] and len(token_differences(run, images)) == 3
  with pytest.raises(UserError, match=r'mixes tokens in windows \(model\.window=2\)'):
    heads(run, images)
  assert list(attention.section(run).numbers) == ['tokens_differ']


def test_sections_show_the_patches_of_their_block(merged):
  training = merged.read('train', 60)
  made, found = centers.section(merged, training)
  assert [made.numbers[block]['centers'] for block in found] == [12, 24]
  html = render('two resolutions', '', [made, relevance.section(merged, training, found)])
  assert 'patches of 4×4 pixels are painted over' in html
  assert len(strongest(merged, training.images[:2], np.zeros(2, int), 3)[0]) == 3
