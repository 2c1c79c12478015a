"""Corruptions against their definitions, computed plainly."""

import colorsys
import io

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_sample_images

from hbf.data.corruptions import CORRUPTIONS, STRENGTHS, corrupt
from hbf.errors import UserError

GREY = np.full((20, 32, 32, 1), 128, np.uint8)


@pytest.fixture(scope='module')
def images():
  """Pieces of photographs, as coarse as CIFAR's: uint8 [16, 32, 32, 3]."""
  pieces = [
    image[y : y + 128, x : x + 128]
    for image in load_sample_images().images
    for y in (0, 200)
    for x in range(0, 512, 128)
  ]
  return np.stack([np.asarray(Image.fromarray(piece).resize((32, 32), Image.Resampling.BOX)) for piece in pieces])


def far(changed, images):
  return np.abs(changed.astype(float) - images).mean()


@pytest.mark.parametrize('name', CORRUPTIONS)
def test_images_stay_images_and_what_is_drawn_depends_on_their_number_alone(name, images):
  for strength in STRENGTHS:
    changed = corrupt(images, name, strength)
    assert changed.dtype == np.uint8 and changed.shape == images.shape and far(changed, images) > 0.2
    np.testing.assert_array_equal(corrupt(images[:3], name, strength), changed[:3])
  grey = corrupt(images[..., :1], name, 3)
  assert grey.shape == (*images.shape[:3], 1)
  large = images.repeat(2, axis=1).repeat(2, axis=2)
  assert corrupt(large, name, 5).shape == large.shape


@pytest.mark.parametrize(
  'name', sorted(set(CORRUPTIONS) - {'glass_blur', 'frost', 'elastic_transform', 'motion_blur'})
)
def test_stronger_is_farther(name, images):
  """Of those whose parameters all grow; the others trade one for another."""
  distances = [far(corrupt(images, name, strength), images) for strength in STRENGTHS]
  assert (np.diff(distances) > -0.05 * distances[-1]).all() and distances[-1] > 1.3 * distances[0]


def test_noise_has_the_moments_that_define_it():
  x = 128 / 255
  for strength, deviation, photons, share in zip(
    STRENGTHS, (0.04, 0.06, 0.08, 0.09, 0.1), (500, 250, 100, 75, 50), (0.01, 0.02, 0.03, 0.05, 0.07), strict=True
  ):
    gaussian = corrupt(GREY, 'gaussian_noise', strength) / 255
    assert gaussian.mean() == pytest.approx(x, abs=0.003) and gaussian.std() == pytest.approx(deviation, rel=0.02)
    shot = corrupt(GREY, 'shot_noise', strength) / 255
    assert shot.mean() == pytest.approx(x, abs=0.003) and shot.var() == pytest.approx(x / photons, rel=0.05)
    impulse = corrupt(GREY, 'impulse_noise', strength)
    assert (impulse == 0).mean() == pytest.approx(share / 2, rel=0.15)
    assert (impulse == 255).mean() == pytest.approx(share / 2, rel=0.15)


def test_blurs_keep_what_is_even_and_the_light_of_what_is_not():
  point = np.zeros((1, 33, 33, 1), np.uint8)
  point[0, 16, 16] = 255
  for name in ('defocus_blur', 'motion_blur', 'zoom_blur'):
    np.testing.assert_array_equal(corrupt(GREY, name, 5), GREY)
    spread = corrupt(np.tile(point, (4, 1, 1, 1)), name, 3).sum(axis=(1, 2, 3)) / 255
    assert (np.abs(spread - 1) < (0.1 if name != 'zoom_blur' else 0.3)).all()


def test_colours_are_those_of_the_definitions(images):
  x = images[0].astype(np.float64) / 255
  contrast = (x - x.mean(axis=(0, 1))) * 0.4 + x.mean(axis=(0, 1))
  np.testing.assert_allclose(corrupt(images[:1], 'contrast', 3)[0], 255 * contrast.clip(0, 1), atol=0.51)
  bright = np.empty_like(x)
  for place in np.ndindex(32, 32):
    h, s, v = colorsys.rgb_to_hsv(*x[place])
    bright[place] = colorsys.hsv_to_rgb(h, s, min(v + 0.15, 1))
  np.testing.assert_allclose(corrupt(images[:1], 'brightness', 3)[0], 255 * bright, atol=0.51)


def test_pixels_and_compression_are_pillows(images):
  image = Image.fromarray(images[0])
  pixelated = image.resize((27, 27), Image.Resampling.BOX).resize((32, 32), Image.Resampling.BOX)
  np.testing.assert_array_equal(corrupt(images[:1], 'pixelate', 3)[0], np.asarray(pixelated))
  buffer = io.BytesIO()
  image.save(buffer, 'JPEG', quality=58)
  np.testing.assert_array_equal(corrupt(images[:1], 'jpeg_compression', 3)[0], np.asarray(Image.open(buffer)))


def test_glass_only_moves_pixels_where_it_hardly_blurs(images):
  changed = corrupt(images, 'glass_blur', 1)  # a Gaussian of 0.05 pixels is none
  np.testing.assert_array_equal(np.sort(changed, axis=(1)).sum((1, 2)), np.sort(images, axis=1).sum((1, 2)))
  assert (changed != images).mean() > 0.5


def test_what_cannot_be_is_refused():
  with pytest.raises(UserError, match="'frog'"):
    corrupt(GREY, 'frog', 1)
  with pytest.raises(UserError, match='strength 1 to 5: it is 6'):
    corrupt(GREY, 'fog', 6)
  with pytest.raises(UserError, match='square uint8 images'):
    corrupt(GREY[:, :20], 'fog', 1)
