"""Tests of the corruptions against plain implementations of their definitions."""

import colorsys
import io

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_sample_images

from hbf.data.augment.corruptions import CORRUPTIONS, GROUPS, STRENGTHS, corrupt
from hbf.errors import UserError

GRAY = np.full((20, 32, 32, 1), 128, np.uint8)
POINTS = np.pad(np.full((20, 1, 1, 1), 255, np.uint8), ((0, 0), (16, 16), (16, 16), (0, 0)))
# A greater strength of these corruptions increases one parameter and decreases another, so the error may shrink.
TRADING = ('glass_blur', 'frost', 'elastic_transform')


def box(images, side):
  """Return square images at a lower resolution."""
  return np.stack([np.asarray(Image.fromarray(image).resize((side, side), Image.Resampling.BOX)) for image in images])


def far(changed, images):
  return np.abs(changed.astype(float) - images).mean()


@pytest.fixture(scope='module')
def photographs():
  """Return pieces of photographs, uint8 [16, 128, 128, 3]."""
  places = [(y, x) for y in (0, 200) for x in range(0, 512, 128)]
  return np.stack([image[y : y + 128, x : x + 128] for image in load_sample_images().images for y, x in places])


@pytest.fixture(scope='module')
def images(photographs):
  """Return the photographs at the resolution of CIFAR, uint8 [16, 32, 32, 3]."""
  return box(photographs, 32)


def test_the_groups_are_the_corruptions_in_their_order():
  assert [name for names in GROUPS.values() for name in names] == list(CORRUPTIONS)


@pytest.mark.parametrize('name', CORRUPTIONS)
def test_images_stay_images_and_what_is_drawn_depends_on_their_number_alone(name, images):
  for strength in STRENGTHS:
    changed = corrupt(images, name, strength)
    assert changed.dtype == np.uint8 and changed.shape == images.shape and far(changed, images) > 0.2
    np.testing.assert_array_equal(corrupt(images[:3], name, strength), changed[:3])
  gray = corrupt(images[..., :1], name, 3)
  assert gray.shape == (*images.shape[:3], 1)
  large = images.repeat(2, axis=1).repeat(2, axis=2)
  assert corrupt(large, name, 5).shape == large.shape


@pytest.mark.parametrize('name', [name for name in CORRUPTIONS if name not in TRADING])
def test_stronger_is_farther(name, images):
  """The test allows for the noise of 16 images: snow's second and third strength, for example, are about equal."""
  distances = [far(corrupt(images, name, strength), images) for strength in STRENGTHS]
  assert (np.diff(distances) > -0.05 * distances[-1]).all() and distances[-1] > 1.3 * distances[0]


def test_noise_has_the_moments_that_define_it():
  x = 128 / 255
  for strength, deviation, photons, share in zip(
    STRENGTHS, (0.04, 0.06, 0.08, 0.09, 0.1), (500, 250, 100, 75, 50), (0.01, 0.02, 0.03, 0.05, 0.07), strict=True
  ):
    gaussian = corrupt(GRAY, 'gaussian_noise', strength) / 255
    assert gaussian.mean() == pytest.approx(x, abs=0.003) and gaussian.std() == pytest.approx(deviation, rel=0.02)
    shot = corrupt(GRAY, 'shot_noise', strength) / 255
    assert shot.mean() == pytest.approx(x, abs=0.003) and shot.var() == pytest.approx(x / photons, rel=0.05)
    impulse = corrupt(GRAY, 'impulse_noise', strength)
    assert (impulse == 0).mean() == pytest.approx(share / 2, rel=0.15)
    assert (impulse == 255).mean() == pytest.approx(share / 2, rel=0.15)


@pytest.mark.parametrize('name', [*GROUPS['blur'], 'elastic_transform', 'pixelate', 'jpeg_compression'])
def test_images_of_one_color_stay_the_same(name):
  for strength in STRENGTHS:
    np.testing.assert_array_equal(corrupt(GRAY, name, strength), GRAY)


@pytest.mark.parametrize('name', ['defocus_blur', 'motion_blur', 'zoom_blur'])
def test_blurs_keep_the_light_but_for_what_zooms_enlarge(name):
  """If a point in the middle is enlarged z times, linear interpolation gives each neighbor 1 − 1/z."""
  for strength, most in zip(STRENGTHS, (1.06, 1.11, 1.16, 1.21, 1.26), strict=True):
    light = corrupt(POINTS, name, strength).sum(axis=(1, 2, 3)) / 255
    enlarged = np.mean([1, *(3 - 2 / np.arange(1, most, 0.01)) ** 2]) if name == 'zoom_blur' else 1
    np.testing.assert_allclose(light, enlarged, atol=0.06)  # levels are rounded, most of them small


@pytest.mark.parametrize('name', ['defocus_blur', 'motion_blur', 'zoom_blur'])
def test_lengths_grow_with_the_images(name, photographs, images):
  large = corrupt(box(photographs, 64), name, 5)
  assert far(box(large, 32), corrupt(images, name, 5)) < 0.25 * far(corrupt(images, name, 5), images)


def test_motion_goes_one_way_and_grows_weaker():
  weights = np.exp(-(np.arange(19) ** 2) / (2 * (2.5 * 33 / 32) ** 2))
  for image in corrupt(POINTS, 'motion_blur', 5)[..., 0]:
    rows, columns = np.nonzero(image)
    assert (columns <= 16).all() and (np.abs(rows - 16) <= 16 - columns).all() and columns.min() < 11
    assert image[16, 16] == pytest.approx(255 / weights.sum(), abs=1)


def test_colors_are_those_of_the_definitions(images):
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


def test_glass_takes_pixels_from_above_and_left_where_it_hardly_blurs(images):
  changed = corrupt(images, 'glass_blur', 1)  # A Gaussian of 0.05 pixels does nothing.
  near = [images[:, 2 - up : 32 - up, 2 - left : 32 - left] for up in (0, 1) for left in (0, 1)]
  is_it = np.stack([(changed[:, 2:, 2:] == pixels).all(axis=-1) for pixels in near])
  assert is_it.any(axis=0).all() and (is_it.mean(axis=(1, 2, 3)) >= 0.25).all()
  np.testing.assert_array_equal(changed[:, :2], images[:, :2])
  np.testing.assert_array_equal(changed[:, :, :2], images[:, :, :2])


def test_fog_is_from_none_to_the_brightest_and_rougher_where_it_decays_less():
  x, rough = 128 / 255, []
  for strength, amount in zip(STRENGTHS, (0.2, 0.5, 0.75, 1, 1.5), strict=True):
    foggy = corrupt(GRAY, 'fog', strength) / 255
    np.testing.assert_allclose(foggy.min(axis=(1, 2, 3)), x * x / (x + amount), atol=0.5 / 255)
    np.testing.assert_allclose(foggy.max(axis=(1, 2, 3)), x, atol=0.5 / 255)
    fog = (foggy * (x + amount) / x - x) / amount  # from 0 to 1
    rough.append(np.abs(np.diff(fog, axis=1)).mean())
  # The expected values are the authors' code's, measured on 300 images. Levels are rounded here.
  np.testing.assert_allclose(rough, (0.020, 0.020, 0.021, 0.024, 0.029), rtol=0.15)


def test_snow_only_brightens_and_frost_has_the_measures_of_photographs(images):
  for strength in STRENGTHS:
    assert (corrupt(images, 'snow', strength).astype(int) >= images.astype(int) - 1).all()
  ice = corrupt(np.zeros((200, 32, 32, 3), np.uint8), 'frost', 3) / 255 / 0.4
  np.testing.assert_allclose(ice.mean(axis=(0, 1, 2)), (0.56, 0.65, 0.69), atol=0.04)
  assert ice.std(axis=(1, 2)).mean() == pytest.approx(0.09, abs=0.01)
  assert np.abs(np.diff(ice, axis=1)).mean() == pytest.approx(0.075, abs=0.01)


def test_wrong_arguments_are_refused():
  with pytest.raises(UserError, match="'frog'"):
    corrupt(GRAY, 'frog', 1)
  with pytest.raises(UserError, match='is 6; expected a whole number from 1 to 5'):
    corrupt(GRAY, 'fog', 6)
  for unfit in (GRAY[:, :20], GRAY[0], GRAY / 255, GRAY.repeat(2, axis=3)):
    with pytest.raises(UserError, match='square uint8 images'):
      corrupt(unfit, 'fog', 1)
