"""The 15 common corruptions of Hendrycks & Dietterich 2019, at the five strengths of CIFAR-10-C.

The strengths are the authors' for images of 32 pixels (github.com/hendrycks/robustness, make_cifar_c.py). For other
images, lengths in pixels scale with the side. The grain of noise and the blocks of JPEG do not scale. The authors'
Tiny ImageNet-C and ImageNet-C have other strengths.

The random numbers differ from those of the authors' files. These are the other differences:
  frost: a fractal with similar light, contrast and grain replaces their photographs, which this package lacks.
  motion_blur, snow: the blur follows ImageMagick's rule, without ImageMagick.
  fog: a new point of the fractal is the mean of four neighbors. A mistake in the authors' code takes one twice.
  zoom_blur, snow: images are enlarged about the exact center. The authors' center is up to a pixel off.
  elastic_transform: the affine map and the field are composed, and the image is resampled once, which blurs it less.
  all: levels are rounded, not truncated.

Use error rates on these images to compare models of this library. A comparison with published error rates is only
rough, above all for frost.

The function of a corruption, such as `_snow`, has three arguments. The images `x` are float32 [n, side, side, C] from
0 to 1. The parameters belong to one strength. Lengths among them are in pixels of an image of 32×32, unless the
function's docstring gives another unit. `draws` has a generator of random numbers for each image.
"""

import functools
import io
from collections.abc import Callable
from typing import Any

import numpy as np
from PIL import Image
from scipy import ndimage

from hbf.data.images.codec import to_pillow
from hbf.errors import UserError, choose

STRENGTHS = (1, 2, 3, 4, 5)
Draws = list[np.random.Generator]  # one generator for each image
_CUT = 1e-3  # Smaller weights of a motion blur are left out.


def corrupt(images: np.ndarray, name: str, strength: int, seed: int = 0) -> np.ndarray:
  """Return images with a corruption.

  The random numbers of an image are a function of (seed, name, strength, index of the image). So the result for the
  first images of a data set does not depend on the number of images.

  Args:
    images: uint8 [n, side, side, 1 or 3].
    name: name of the corruption, a key of `CORRUPTIONS`.
    strength: strength of the corruption, 1 to 5.
    seed: seed of the random numbers.

  Returns:
    Images of the same shape, uint8.

  Raises:
    UserError: the corruption or the strength is unknown, or the images have a wrong type or shape.
  """
  function, parameters = choose('corruption', name, CORRUPTIONS)
  if strength not in STRENGTHS:
    raise UserError(f'the strength of a corruption is {strength}; expected a whole number from 1 to 5')
  shape = images.shape
  if images.dtype != np.uint8 or len(shape) != 4 or shape[1] != shape[2] or shape[3] not in (1, 3):
    raise UserError(f'corruptions take square uint8 images [n, side, side, 1 or 3]: got {images.dtype} {list(shape)}')
  number = list(CORRUPTIONS).index(name)
  draws = [np.random.default_rng([seed, number, strength, i]) for i in range(len(images))]
  out = function(images.astype(np.float32) / 255, parameters[strength - 1], draws)
  return np.rint(255 * np.clip(out, 0, 1)).astype(np.uint8)


def _gaussian_noise(x: np.ndarray, deviation: float, draws: Draws) -> np.ndarray:
  return x + deviation * _drawn(draws, lambda random: random.standard_normal(x.shape[1:], np.float32))


def _shot_noise(x: np.ndarray, photons: float, draws: Draws) -> np.ndarray:
  return np.stack([random.poisson(image * photons) / photons for image, random in zip(x, draws, strict=True)])


def _impulse_noise(x: np.ndarray, share: float, draws: Draws) -> np.ndarray:
  u = _drawn(draws, lambda random: random.random(x.shape[1:], np.float32))
  return np.where(u < share, u < share / 2, x)


def _defocus_blur(x: np.ndarray, parameters: tuple[float, float], draws: Draws) -> np.ndarray:
  """Convolve the images with a smoothed disk. The parameters are the disk's radius and the sigma of its smoothing."""
  radius, smooth = (length * _scale(x) for length in parameters)
  margin = int(np.ceil(_scale(x)))
  reach = int(np.ceil(radius)) + margin
  rows, columns = np.mgrid[-reach : reach + 1, -reach : reach + 1]
  kernel = ndimage.gaussian_filter((rows**2 + columns**2 <= radius**2).astype(np.float32), smooth, radius=margin)
  return ndimage.convolve(x, (kernel / kernel.sum())[None, :, :, None], mode='mirror')


def _glass_blur(x: np.ndarray, parameters: tuple[float, int, int], draws: Draws) -> np.ndarray:
  """Blur the images, replace each pixel by a random nearby pixel, once or twice, and blur again.

  The parameters are the sigma of the blur, the largest distance to a nearby pixel along an axis, and how many
  times each pixel is replaced. Pixels at the border stay.
  """
  # The paper exchanges pairs of pixels. The authors' code instead copies one pixel of a pair to the other, because
  # the second half of an exchange reads the result of the first half. This function does the same.
  sigma, far, times = parameters[0] * _scale(x), max(1, round(parameters[1] * _scale(x))), parameters[2]
  blur = functools.partial(ndimage.gaussian_filter, sigma=(0, sigma, sigma, 0), mode='nearest')
  x, inner = blur(x), slice(far + 1, x.shape[1] - far + 1)
  rows, columns = np.mgrid[inner, inner]
  every = np.arange(len(x))[:, None, None]
  for _ in range(times):
    offsets = _drawn(draws, lambda random: random.integers(-far, far, (2, *rows.shape)))
    x[:, inner, inner] = x[every, rows + offsets[:, 0], columns + offsets[:, 1]]
  return blur(x)


def _motion_blur(x: np.ndarray, parameters: tuple[float, float], draws: Draws) -> np.ndarray:
  return _blurred_by_motion(x, *parameters, _drawn(draws, lambda random: random.uniform(-45, 45)))


def _zoom_blur(x: np.ndarray, most: float, draws: Draws) -> np.ndarray:
  zooms = np.arange(1, most, 0.01)
  return (x + sum(_zoomed(x, zoom) for zoom in zooms)) / (len(zooms) + 1)


def _snow(x: np.ndarray, parameters: tuple[float, ...], draws: Draws) -> np.ndarray:
  mean, deviation, zoom, threshold, radius, sigma, kept = parameters
  flakes = mean + deviation * _drawn(draws, lambda random: random.standard_normal((*x.shape[1:3], 1), np.float32))
  flakes = _zoomed(flakes, max(1, zoom * _scale(x)))
  flakes = np.clip(np.where(flakes < threshold, 0, flakes), 0, 1)
  flakes = _blurred_by_motion(flakes, radius, sigma, _drawn(draws, lambda random: random.uniform(-135, -45)))
  pale = np.maximum(x, 1.5 * _luma(x) + 0.5)
  return kept * x + (1 - kept) * pale + flakes + flakes[:, ::-1, ::-1]  # each flake twice, also turned by 180 degrees


def _frost(x: np.ndarray, parameters: tuple[float, float], draws: Draws) -> np.ndarray:
  """Add ice of random brightness, with ridges like crystals. The ice is bluish in images with color.

  The result is the image times the first parameter, plus the ice times the second.
  """
  # The ice has the statistics of crops of the authors' photographs, with white as 1. The mean level of a crop is
  # 0.63. Levels vary by ± 0.15 between crops and by ± 0.09 within a crop. Neighboring pixels differ by 0.075.
  kept, added = parameters
  light = _drawn(draws, lambda random: random.uniform(0.4, 0.85))[:, None, None, None]
  ridges = (1 - np.abs(2 * _fractal(x, 1.15, draws) - 1)) ** 3
  ice = light + 0.3 * (ridges - ridges.mean(axis=(1, 2), keepdims=True))
  tint = np.array([0.89, 1.02, 1.09]) if x.shape[-1] == 3 else 1.0
  return kept * x + added * tint * ice


def _fog(x: np.ndarray, parameters: tuple[float, float], draws: Draws) -> np.ndarray:
  amount, decay = parameters
  brightest = x.max(axis=(1, 2, 3), keepdims=True)
  return (x + amount * _fractal(x, decay, draws)) * brightest / (brightest + amount)


def _brightness(x: np.ndarray, added: float, draws: Draws) -> np.ndarray:
  """Add `added` to the value V of each color in HSV, up to 1. Keep hue and saturation."""
  value = x.max(axis=-1, keepdims=True)
  more = np.minimum(value + added, 1)
  return np.where(value > 0, x * more / np.where(value > 0, value, 1), more)


def _contrast(x: np.ndarray, kept: float, draws: Draws) -> np.ndarray:
  mean = x.mean(axis=(1, 2), keepdims=True)
  return kept * (x - mean) + mean


def _elastic_transform(x: np.ndarray, parameters: tuple[float, float, float], draws: Draws) -> np.ndarray:
  """Displace the pixels by a random affine map and by a smooth random field.

  The affine map is the one that moves three fixed points by random distances. The parameters, as fractions of the
  side, are the amplitude of the field, the sigma of its smoothing, and the largest distance along an axis by which a
  point moves.
  """
  far, sigma, jitter = (part * x.shape[1] for part in parameters)
  return np.stack([_bent(image, far, sigma, jitter, random) for image, random in zip(x, draws, strict=True)])


def _bent(image: np.ndarray, far: float, sigma: float, jitter: float, random: np.random.Generator) -> np.ndarray:
  side, middle = image.shape[0], image.shape[0] // 2
  third = side // 3
  points = middle + third * np.array([[1, 1], [1, -1], [-1, -1]], float)
  moved = points + random.uniform(-jitter, jitter, points.shape)
  back = np.linalg.solve(np.c_[moved, np.ones(3)], points)  # the map from new to old places
  places = np.mgrid[:side, :side].reshape(2, -1).T.astype(float)
  fields = random.uniform(-1, 1, (2, side, side))
  if far:
    places += far * ndimage.gaussian_filter(fields, (0, sigma, sigma), truncate=3).reshape(2, -1).T
  at = (np.c_[places, np.ones(len(places))] @ back).T
  bent = [ndimage.map_coordinates(channel, at, order=1, mode='mirror') for channel in np.moveaxis(image, -1, 0)]
  return np.stack(bent, axis=-1).reshape(image.shape)


def _pixelate(x: np.ndarray, part: float, draws: Draws) -> np.ndarray:
  side = x.shape[1]
  few = (int(side * part),) * 2
  box = Image.Resampling.BOX
  return _by_pillow(x, lambda image: image.resize(few, box).resize((side, side), box))


def _jpeg_compression(x: np.ndarray, quality: int, draws: Draws) -> np.ndarray:
  def stored(image: Image.Image) -> Image.Image:
    buffer = io.BytesIO()
    image.save(buffer, 'JPEG', quality=quality)
    return Image.open(buffer)

  return _by_pillow(x, stored)


def _scale(x: np.ndarray) -> float:
  """Return the side of the images, divided by the 32 pixels of the authors' images."""
  return x.shape[1] / 32


def _drawn(draws: Draws, draw: Callable[[np.random.Generator], Any]) -> np.ndarray:
  return np.stack([draw(random) for random in draws])


def _blurred_by_motion(x: np.ndarray, radius: float, sigma: float, degrees: np.ndarray) -> np.ndarray:
  """Blur images as a motion of the camera does. `degrees` [n] is the direction of the motion for each image.

  A pixel becomes a weighted mean of the pixels in this direction, up to a distance of twice the `radius`. The weights
  are one half of a Gaussian with the standard deviation `sigma`.
  """
  steps = np.arange(int(2 * radius * _scale(x)) + 1)
  weights = np.exp(-(steps**2) / (2 * (sigma * _scale(x)) ** 2))
  weights, side, angle = weights[weights > _CUT], x.shape[1], np.deg2rad(degrees)
  every, places, out = np.arange(len(x))[:, None, None], np.arange(side), np.zeros_like(x)
  for step, weight in enumerate(weights / weights.sum()):
    rows = np.clip(places + np.rint(step * np.sin(angle)).astype(int)[:, None], 0, side - 1)
    columns = np.clip(places + np.rint(step * np.cos(angle)).astype(int)[:, None], 0, side - 1)
    out += np.float32(weight) * x[every, rows[:, :, None], columns[:, None]]
  return out


def _zoomed(x: np.ndarray, zoom: float) -> np.ndarray:
  """Enlarge images about their center, bilinearly, and crop them to their original size."""
  side = x.shape[1]
  at = (np.arange(side) - (side - 1) / 2) / zoom + (side - 1) / 2
  matrix = np.maximum(1 - np.abs(at[:, None] - np.arange(side)), 0).astype(np.float32)
  return np.einsum('ij,njkc,lk->nilc', matrix, x, matrix, optimize=True)


def _fractal(x: np.ndarray, decay: float, draws: Draws) -> np.ndarray:
  """Return a random picture of clouds for each image, [n, side, side, 1], with values from 0 to 1.

  The method is midpoint displacement (Fournier, Fussell & Carpenter 1982). In each round, a periodic grid becomes
  twice as fine. A new point is the mean of its four neighbors plus a random displacement. As in the authors' code,
  the displacements are divided by decay² in each round.
  """
  side = x.shape[1]
  step = 1 << (side - 1).bit_length()
  displaced = _drawn(draws, lambda random: random.uniform(-1, 1, (step, step)))
  field = np.zeros_like(displaced)
  while step > 1:
    old, new = slice(None, None, step), slice(step // 2, None, step)
    corners = field[:, old, old]
    pairs = corners + np.roll(corners, -1, 1), corners + np.roll(corners, -1, 2)
    centers = (pairs[0] + np.roll(pairs[0], -1, 2)) / 4 + displaced[:, new, new]
    field[:, new, new] = centers
    field[:, new, old] = (pairs[0] + centers + np.roll(centers, 1, 2)) / 4 + displaced[:, new, old]
    field[:, old, new] = (pairs[1] + centers + np.roll(centers, 1, 1)) / 4 + displaced[:, old, new]
    displaced, step = displaced / decay**2, step // 2
  low, high = (bound(field, axis=(1, 2), keepdims=True) for bound in (np.min, np.max))
  return ((field - low) / (high - low))[:, :side, :side, None].astype(np.float32)


def _luma(x: np.ndarray) -> np.ndarray:
  """Return the luma of the colors (ITU-R BT.601), [n, side, side, 1]."""
  return x @ np.array([[0.299], [0.587], [0.114]], np.float32) if x.shape[-1] == 3 else x


def _by_pillow(x: np.ndarray, change: Callable[[Image.Image], Image.Image]) -> np.ndarray:
  images = np.rint(255 * x).astype(np.uint8)
  changed = [np.asarray(change(to_pillow(image))).reshape(image.shape) for image in images]
  return np.stack(changed).astype(np.float32) / 255


# Each name has a function, and the function's parameters at the five strengths. The order is that of `GROUPS`.
CORRUPTIONS: dict[str, tuple[Callable[[np.ndarray, Any, Draws], np.ndarray], tuple[Any, ...]]] = {
  'gaussian_noise': (_gaussian_noise, (0.04, 0.06, 0.08, 0.09, 0.10)),
  'shot_noise': (_shot_noise, (500, 250, 100, 75, 50)),
  'impulse_noise': (_impulse_noise, (0.01, 0.02, 0.03, 0.05, 0.07)),
  'defocus_blur': (_defocus_blur, ((0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1, 0.2), (1.5, 0.1))),
  'glass_blur': (_glass_blur, ((0.05, 1, 1), (0.25, 1, 1), (0.4, 1, 1), (0.25, 1, 2), (0.4, 1, 2))),
  'motion_blur': (_motion_blur, ((6, 1), (6, 1.5), (6, 2), (8, 2), (9, 2.5))),
  'zoom_blur': (_zoom_blur, (1.06, 1.11, 1.16, 1.21, 1.26)),
  'snow': (
    _snow,
    (
      (0.1, 0.2, 1, 0.6, 8, 3, 0.95),
      (0.1, 0.2, 1, 0.5, 10, 4, 0.9),
      (0.15, 0.3, 1.75, 0.55, 10, 4, 0.9),
      (0.25, 0.3, 2.25, 0.6, 12, 6, 0.85),
      (0.3, 0.3, 1.25, 0.65, 14, 12, 0.8),
    ),
  ),
  'frost': (_frost, ((1, 0.2), (1, 0.3), (0.9, 0.4), (0.85, 0.4), (0.75, 0.45))),
  'fog': (_fog, ((0.2, 3), (0.5, 3), (0.75, 2.5), (1, 2), (1.5, 1.75))),
  'brightness': (_brightness, (0.05, 0.1, 0.15, 0.2, 0.3)),
  'contrast': (_contrast, (0.75, 0.5, 0.4, 0.3, 0.15)),
  'elastic_transform': (
    _elastic_transform,
    ((0, 0, 0.08), (0.05, 0.2, 0.07), (0.08, 0.06, 0.06), (0.1, 0.04, 0.05), (0.1, 0.03, 0.03)),
  ),
  'pixelate': (_pixelate, (0.95, 0.9, 0.85, 0.75, 0.65)),
  'jpeg_compression': (_jpeg_compression, (80, 65, 58, 50, 40)),
}
# The groups of the paper, in the same order.
GROUPS = {
  'noise': ('gaussian_noise', 'shot_noise', 'impulse_noise'),
  'blur': ('defocus_blur', 'glass_blur', 'motion_blur', 'zoom_blur'),
  'weather': ('snow', 'frost', 'fog', 'brightness'),
  'digital': ('contrast', 'elastic_transform', 'pixelate', 'jpeg_compression'),
}
