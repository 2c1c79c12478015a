"""Tests of attacks: they stay in the ball, find a linear model's worst case, and follow the papers' schedules."""

import jax.numpy as jnp
import numpy as np
import pytest

from hbf.analysis import attacks
from hbf.analysis.attacks import apgd, checkpoints, side_of_square, square

pytestmark = pytest.mark.slow  # a study is run by hand, and changes rarely

RNG = np.random.default_rng(0)
IMAGES = RNG.random((12, 8, 8, 3)).astype(np.float32)
WEIGHTS = RNG.normal(size=(192, 2)).astype(np.float32)
EPSILON = 0.05


def linear(x):
  return x.reshape(len(x), -1) @ jnp.asarray(WEIGHTS)


def sure(x):
  """Return logits with the gradients of `linear`. The answer is always class 0, so no attack ends early."""
  return linear(x) + jnp.array([1e3, 0.0])


def bent(x):
  """Return the logits of a model whose loss rises and falls along a line."""
  return jnp.sin(9 * linear(x)) + jnp.array([2.5, 0.0])


def margins(model, x, labels=None):
  z = np.asarray(model(jnp.asarray(x)), np.float64)
  return z[:, 0] - z[:, 1]


ZEROS = np.zeros(12, int)


@pytest.mark.parametrize('attack', [apgd, square])
@pytest.mark.parametrize('model', [sure, bent])
def test_a_changed_image_stays_in_the_ball_and_is_never_better_than_the_start(attack, model):
  found = attack(model, IMAGES, ZEROS, EPSILON, 30)
  assert np.abs(found.images - IMAGES).max() <= EPSILON + 1e-6
  assert found.images.min() >= 0 and found.images.max() <= 1
  start = attack(model, IMAGES, ZEROS, EPSILON, 0 if attack is apgd else 1)
  assert np.all(margins(model, found.images) <= margins(model, start.images) + 1e-5)
  shorter = attack(model, IMAGES, ZEROS, EPSILON, 30)
  np.testing.assert_array_equal(found.images, shorter.images)


def worst():
  """Return the images in the attack's ball that a linear model likes least. They are corners of the ball."""
  direction = np.sign(WEIGHTS[:, 1] - WEIGHTS[:, 0]).reshape(8, 8, 3)
  return np.clip(IMAGES + EPSILON * direction, 0, 1)


def nearly_sure(x):
  """Return the logits of a linear model that always answers class 0 and has a loss that is not rounded to 0."""
  return linear(x) / 20 + jnp.array([5.0, 0.0])


def test_apgd_finds_the_worst_case_of_a_linear_model():
  found = apgd(nearly_sure, IMAGES, ZEROS, EPSILON, 20)
  assert not found.fooled.any() and (found.queries == 21).all()
  np.testing.assert_allclose(found.images, worst(), atol=1e-6)


def test_square_comes_near_the_worst_case_of_a_linear_model():
  before, least = margins(linear, IMAGES), margins(linear, worst())
  found = square(sure, IMAGES, ZEROS, EPSILON, 1_000)
  assert not found.fooled.any() and (found.queries == 1_000).all()
  gained = (before - margins(linear, found.images)) / (before - least)
  assert gained.min() > 0.6 and gained.max() <= 1 + 1e-5


@pytest.mark.parametrize('attack', [apgd, square])
def test_a_ball_of_radius_0_holds_the_image_alone(attack):
  labels = np.asarray(linear(jnp.asarray(IMAGES))).argmax(axis=1)
  labels[:3] = 1 - labels[:3]
  found = attack(linear, IMAGES, labels, 0.0, 10)
  np.testing.assert_array_equal(found.images, IMAGES)
  np.testing.assert_array_equal(found.fooled, np.arange(12) < 3)
  assert found.queries[:3].tolist() == [0, 0, 0] and np.all(found.queries[3:] == 10 + (attack is apgd))


@pytest.mark.parametrize('attack', [apgd, square])
def test_fooled_images_have_wrong_answers_and_do_not_depend_on_the_parts(attack, monkeypatch):
  labels = np.asarray(linear(jnp.asarray(IMAGES))).argmax(axis=1)
  found = attack(linear, IMAGES, labels, EPSILON, 40)
  assert found.fooled.any()
  answers = np.asarray(linear(jnp.asarray(found.images))).argmax(axis=1)
  np.testing.assert_array_equal(answers != labels, found.fooled)
  assert np.all(found.queries[found.fooled] >= 1)
  monkeypatch.setattr(attacks, 'PART', 7)
  again = attack(linear, IMAGES, labels, EPSILON, 40)
  np.testing.assert_array_equal(again.queries, found.queries)
  np.testing.assert_allclose(again.images, found.images, atol=1e-6)


def test_checkpoints_are_those_of_the_paper():
  """The paper is Croce & Hein 2020, section 3.1. The gaps shrink by 3% of the steps until they are 6%."""
  assert checkpoints(100).tolist() == [22, 41, 57, 70, 80, 87, 93, 99]
  gaps = np.diff([0, *checkpoints(1_000)])
  assert gaps.tolist() == [220, 190, 160, 130, 100, 70, 60, 60]


def apgd_by_its_definition(image, epsilon, steps, start):
  """Run Algorithm 1 of the paper in float64, for the loss of `bent`. Return the greatest loss."""
  weights = WEIGHTS.astype(np.float64)

  def loss_and_gradient(x):
    products = 9 * x.reshape(-1) @ weights
    z = np.sin(products) + [2.5, 0.0]
    p = np.exp(z - z.max()) / np.exp(z - z.max()).sum()
    slopes = (p - [1.0, 0.0]) * 9 * np.cos(products)
    return -np.log(p[0]), (weights @ slopes).reshape(x.shape)

  def within(x):
    return np.clip(np.clip(x, image - epsilon, image + epsilon), 0, 1)

  x, size, checks = [start], [2 * epsilon], [0, *checkpoints(steps)]
  best, best_loss, losses = start, loss_and_gradient(start)[0], [loss_and_gradient(start)[0]]
  halved, at_check = False, best_loss
  rises = 0
  for k in range(steps):
    ahead = within(x[k] + size[-1] * np.sign(loss_and_gradient(x[k])[1]))
    a = 0.75 if k else 1.0
    new = within(x[k] + a * (ahead - x[k]) + (1 - a) * (x[k] - x[k - 1] if k else 0))
    loss = loss_and_gradient(new)[0]
    rises += loss > losses[-1]
    if loss > best_loss:
      best, best_loss = new, loss
    if k + 1 in checks:
      length = k + 1 - checks[checks.index(k + 1) - 1]
      halve = rises < 0.75 * length or (not halved and at_check == best_loss)
      if halve:
        size.append(size[-1] / 2)
        new, loss = best, best_loss
      halved, at_check, rises = halve, best_loss, 0
    x.append(new)
    losses.append(loss)
  return best


def test_apgd_is_algorithm_1():
  import jax

  with jax.enable_x64(True):
    found = apgd(bent, IMAGES, ZEROS, EPSILON, 50)
    starts = apgd(bent, IMAGES, ZEROS, EPSILON, 0).images
  for i in range(12):
    expected = apgd_by_its_definition(IMAGES[i].astype(np.float64), EPSILON, 50, starts[i].astype(np.float64))
    got, want = (margins(bent, z[None])[0] for z in (found.images[i], expected))
    assert got == pytest.approx(want, abs=0.05)


def test_the_square_shrinks_as_the_paper_says():
  """At first the square has 80% of 32×32 pixels. Its area is halved after 10, 50, 200, … of 10,000 steps."""
  sides = [int(side_of_square(i, 10_000, 1024)) for i in (0, 9, 10, 49, 50, 200, 1_000, 2_000, 4_000, 6_000, 8_000)]
  assert sides == [29, 29, 20, 20, 14, 10, 7, 5, 4, 3, 2]
  assert int(side_of_square(1, 1_000, 1024)) == 20 and int(side_of_square(0, 1_000, 1024)) == 29
