"""Out-of-distribution images in the shape of a run's training images.

The images come from folders and from the test splits of data sets, or are noise. At most `MOST` images of each folder
and data set are taken.
"""

import pathlib
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from hbf.analysis.image_run import ImageRun
from hbf.arguments import home_path
from hbf.data.datasets import load
from hbf.data.pipeline.host import read_many
from hbf.data.pipeline.order import evenly_spaced
from hbf.errors import UserError
from hbf.training.predict import find_images, read_image

MOST = 2_000
NOISE = 'noise'
NOTHING: Mapping[str, Collection[str]] = {}


def load_ood_images(
  run: ImageRun, wanted: Sequence[str], without: Mapping[str, Collection[str]] = NOTHING
) -> dict[str, np.ndarray]:
  """Return a dict from the name of each folder and data set to its images, uint8 [m, height, width, channels].

  Square images of the run give all images their size. If they are oblong, the images must have their size already, as
  for `hbf predict`. The channels are those of the run's images. The entry 'noise' is always added: images of random
  pixels.

  Args:
    run: the run.
    wanted: paths of folders of images, and names of data sets. In the result, the name of a folder is the last part
      of its path.
    without: the names of the classes to leave out of a data set, by the name of the data set.

  Raises:
    UserError: two folders or data sets have the same name, a data set is missing, a folder or data set has fewer than
      two images, or an image cannot be read or has another shape.
  """
  random = np.random.default_rng(0)
  found = {NOISE: random.integers(0, 256, (MOST, *run.task.shape), np.uint8)}
  for name in wanted:
    path = pathlib.Path(home_path(name))
    key = path.name if path.is_dir() else name
    if key in found:
      raise UserError(f'{name} and another source have the same name, {key}: give it once, or rename a folder')
    found[key] = _folder(run, path) if path.is_dir() else _dataset(run, name, without.get(name, ()))
    if len(found[key]) < 2:
      raise UserError(f'{name} has {len(found[key])} images to score: give two or more, because an AUROC needs them')
  return found


def _folder(run: ImageRun, folder: pathlib.Path) -> np.ndarray:
  """Return at most `MOST` images of a folder, uint8 [m, height, width, channels]."""
  paths = find_images([str(folder)])
  return np.stack([read_image(paths[i], run.task.shape) for i in evenly_spaced(len(paths), MOST)])


def _dataset(run: ImageRun, name: str, without: Collection[str]) -> np.ndarray:
  """Return at most `MOST` images of a data set's test split, uint8 [m, height, width, channels].

  Images whose class is named in `without` are left out.
  """
  height, width, channels = run.task.shape
  directory = run.restored.config.data.dir
  dataset = load(name=name, dir=directory, root='', image_size=height if height == width else None, download=False)
  if dataset.image_shape[:2] != (height, width):
    other, own = (f'{w}×{h}' for h, w in (dataset.image_shape[:2], (height, width)))
    raise UserError(f'{name} has images of {other} pixels: expected {own}, as in {run.workdir}; leave it out')
  source = dataset.splits['test']
  kept = np.arange(len(source))
  if without:
    _, labels = read_many(source, kept, dataset.image_shape)
    kept = np.flatnonzero(~np.isin(np.array(dataset.class_names)[labels], list(without)))
  found, _ = read_many(source, kept[evenly_spaced(len(kept), MOST)], dataset.image_shape)
  if found.shape[-1] == channels:
    return found
  gray = found.mean(axis=-1, keepdims=True).round().astype(np.uint8)
  return np.broadcast_to(gray, (*found.shape[:-1], channels))
