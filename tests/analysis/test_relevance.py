"""Tests of the relevance of patches for a model with a known answer, and of votes that sum to the logits."""

import numpy as np
import pytest
from matplotlib.text import Text

from hbf.analysis import relevance
from hbf.analysis.centers import census
from hbf.analysis.image_run import LabeledImages
from hbf.analysis.mistakes import confused, most_ambiguous, most_confident, risk_coverage, summary
from hbf.analysis.report.drawing import FRAME
from hbf.analysis.report.sections.centers import marked
from hbf.analysis.report.sections.relevance import Vote, median_share, picture, strongest
from hbf.errors import UserError

IMAGES = np.random.default_rng(0).integers(0, 200, (5, 8, 8, 1), np.uint8)
DECIDING = 6  # the patch that decides the answer


def answers(images):
  """Return probabilities that depend only on the brightness of one 2×2 patch: the third patch in the second row."""
  bright = images[:, 2:4, 4:6].mean(axis=(1, 2, 3)) / 255
  return np.stack([1 - bright, bright], axis=1)


@pytest.mark.parametrize('together', [1, 40, 3_000])
def test_the_patch_that_decides_is_found(monkeypatch, together):
  monkeypatch.setattr(relevance, 'TOGETHER', together)
  found = relevance.relevance(answers, IMAGES, 2, [0])
  assert found.shape == (5, 16)
  whole = answers(IMAGES)
  answer = whole.argmax(axis=1)
  without = np.array([1.0, 0.0])  # of a patch that is black
  expected = whole.max(axis=1) - without[answer]
  np.testing.assert_allclose(found[:, DECIDING], expected)
  assert not np.delete(found, DECIDING, axis=1).any()


def test_the_curve_falls_where_the_deciding_patch_goes():
  images = np.full((3, 8, 8, 1), 204, np.uint8)  # class 1, 0.8
  rest = [i for i in range(16) if i != DECIDING]
  for place in (0, 7, 15):
    order = np.tile([*rest[:place], DECIDING, *rest[place:]], (3, 1))
    gone, left = relevance.deletion(answers, images, 2, [0], order)
    np.testing.assert_allclose(gone, np.arange(17) / 16)
    np.testing.assert_allclose(left, np.tile(np.where(np.arange(17) <= place, 0.8, 0.0), (3, 1)))
  assert [*map(len, relevance.random_orders(4, 16))] == [4, 4, 4]
  np.testing.assert_array_equal(np.sort(relevance.random_orders(4, 16)[0], axis=1), np.tile(np.arange(16), (4, 1)))


def test_patches_are_painted_over():
  gone = np.zeros((5, 16), bool)
  gone[:, [0, DECIDING]] = True
  painted = relevance.paint_over(IMAGES, 2, gone, [7])
  assert (painted[:, :2, :2] == 7).all() and (painted[:, 2:4, 4:6] == 7).all()
  np.testing.assert_array_equal(painted[:, 4:], IMAGES[:, 4:])


@pytest.mark.parametrize(
  'changes',
  [
    {'model.pool': 'sequence', 'model.stage2.heads': 2},
    {'model.pool': 'cls', 'model.layer_scale': 0.5, 'model.stage2.normalization': 'none'},
    {'model.pool': 'mean', 'model.merge': (1,)},
    pytest.param({'model.pool': 'mean'}, marks=pytest.mark.slow),
  ],
)
def test_votes_and_the_rest_sum_up_to_the_logits(made, images, changes):
  """The last tokens are the sum of the centers' contributions, the bias of stage 2, and the tokens before stage 2."""
  run = made(**changes)
  classes = np.arange(len(images)) % 10
  cast = relevance.votes(run, images, classes)
  (number, seen), *_ = run.capture_batches(images)
  tokens = np.asarray(seen.tokens[-1], np.float64)[number >= 0]
  read = relevance.readout(run, tokens, classes)
  params = run.params
  scale = np.asarray(params['block1'].get('scale_stage2', 1.0), np.float64)
  unit = params['block1']['stage2']
  added = np.einsum(
    'bnu,ud->bnd', np.asarray(seen.responses['block1'], np.float64)[number >= 0], _flat(unit['coefficients'])
  )
  before = tokens - (added + np.asarray(unit['bias'])) * scale
  rest = ((before + np.asarray(unit['bias']) * scale) * read).sum((1, 2))
  head, norm = params['head'], params['norm']
  constant = np.asarray(norm['bias'], np.float64) @ np.asarray(head['kernel']) + np.asarray(head['bias'])
  logits = run.logits(images).astype(np.float64)
  expected = np.take_along_axis(excess(logits), classes[:, None], 1)[:, 0]
  np.testing.assert_allclose(cast.sum((1, 2)) + rest + excess(constant)[classes], expected, rtol=1e-3, atol=1e-3)


def excess(z):
  return z - z.mean(axis=-1, keepdims=True)


def _flat(coefficients):
  return np.asarray(coefficients, np.float64).reshape(-1, coefficients.shape[-1])


def test_a_model_without_centers_has_no_votes(made, images):
  with pytest.raises(UserError, match='it has no centers'):
    relevance.votes(made('model=vit'), images, np.zeros(16, int))


def test_the_strongest_votes_are_told_with_the_patch_they_are_cast_through(run, images):
  classes = np.arange(len(images)) % 10
  cast = relevance.votes(run, images, classes)
  for i, (first, second) in enumerate(strongest(run, images, classes, 2)):
    adds = sorted((sum(cast[i, :, a]) for a in range(cast.shape[2])), reverse=True)
    assert [first.adds, second.adds] == pytest.approx(adds[:2])
    assert sum(cast[i, :, first.center]) == pytest.approx(first.adds)
    assert cast[i, first.token, first.center] == max(cast[i, :, first.center])


def test_a_vote_is_cast_through_a_token_that_the_head_reads(made, images):
  run, classes = made(**{'model.pool': 'cls'}), np.zeros(len(images), int)
  cast = relevance.votes(run, images, classes)
  assert (cast[:, 0] < 0).any() and not cast[:, 1:].any()  # the greatest vote of a center against may be a patch's 0
  assert not relevance.tokens_of_votes(run, cast).any()


def test_what_is_lost_without_a_center_is_what_the_whole_network_says(made, images):
  """A vote keeps the last norm and the weights of the pooling fixed. If the center is really removed, both change."""
  run = made(**{'model.pool': 'sequence', 'model.stage2.heads': 2})
  classes, images = np.zeros(3, int), images[:3]
  votes = strongest(run, images, classes, 1)
  unit = run.params['block1']['stage2']
  flat = unit['coefficients'].reshape(-1, unit['coefficients'].shape[-1])
  for i, (vote,) in enumerate(votes):
    silent = unit | {'coefficients': flat.at[vote.center].set(0).reshape(unit['coefficients'].shape)}
    params = run.params | {'block1': run.params['block1'] | {'stage2': silent}}
    whole, left = (excess(run.logits(images[i : i + 1], p)[0])[0] for p in (run.params, params))
    assert vote.lost == pytest.approx(whole - left, abs=1e-4)
    assert abs(vote.lost - vote.adds) > 1e-3 * abs(vote.adds)
  assert median_share(votes) == pytest.approx(np.median([vote.lost / vote.adds for (vote,) in votes]))
  none = Vote(answer=0, center=0, token=0, adds=0.0, lost=0.0)  # as if no token of the image were in a ball
  assert median_share([[none], [none._replace(adds=4.0, lost=1.0)]]) == 0.25 and median_share([[none]]) == 0


@pytest.mark.parametrize(
  ('pool', 'merge', 'count'), [('mean', (), 4), ('cls', (), 4), ('mean', (1,), 2)], ids=['mean', 'cls', 'merged']
)
def test_a_token_is_marked_at_its_patch(made, images, pool, merge, count):
  run = made(**{'model.pool': pool, 'model.merge': merge})
  dark, times = np.zeros_like(images[0]), 6  # 8 pixels are to be 48
  for place in (0, count + 1, count * count - 1):
    frame = (marked(run, 'block1', dark, place + run.first_patch) == FRAME).all(axis=2)
    rows, columns = np.nonzero(frame)
    side = times * 8 // count
    assert (rows.min() // side, columns.min() // side) == divmod(place, count)
    assert not frame[
      rows.min() + times : rows.max() + 1 - times, columns.min() + times : columns.max() + 1 - times
    ].any()
  if pool == 'cls':
    assert not marked(run, 'block1', dark, 0).any()


def test_the_picture_has_a_row_an_image(run, images):
  training = LabeledImages(images, np.zeros(len(images), int))
  drawn = picture(run, training, census(run, images)['block1'], images[:3])
  assert len(drawn.axes) == 6
  answers = run.logits(images[:3]).argmax(axis=1)
  labels = [axis.get_ylabel().split('\n')[0] for axis in drawn.axes[::2]]
  assert labels == [run.classes[answer] for answer in answers]
  assert not any(text.get_parse_math() for text in drawn.findobj(Text))


def test_mistakes():
  p = np.array([[0.9, 0.1, 0.0], [0.4, 0.35, 0.25], [0.1, 0.7, 0.2], [0.0, 0.2, 0.8]])
  labels = np.array([1, 0, 0, 2])
  np.testing.assert_array_equal(most_confident(p, labels, 5), [0, 2])
  np.testing.assert_array_equal(most_ambiguous(p, 2), [1, 2])
  coverage, risk = risk_coverage(p.max(1), p.argmax(1) == labels)
  np.testing.assert_allclose(coverage, [25, 50, 75, 100])
  np.testing.assert_allclose(risk, [100, 50, 200 / 3, 50])
  assert confused(np.array([[5, 2, 0], [3, 9, 1], [0, 0, 4]]), 2) == [(1, 0, 3), (0, 1, 2)]


def test_reliability_is_that_of_scikit_learn():
  from sklearn.calibration import calibration_curve

  random = np.random.default_rng(0)
  logits, labels = random.normal(0, 2, (500, 4)).astype(np.float32), random.integers(0, 4, 500).astype(np.int32)
  found = summary(logits, labels)['reliability']
  p = relevance.probabilities(logits)
  accuracy, confidence = calibration_curve(p.argmax(1) == labels, p.max(1), n_bins=15)
  np.testing.assert_allclose([part['accuracy'] for part in found], 100 * accuracy, rtol=1e-4)
  np.testing.assert_allclose([part['confidence'] for part in found], 100 * confidence, rtol=1e-4)
