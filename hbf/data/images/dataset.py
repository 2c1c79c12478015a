"""A data set of images with their targets."""

import dataclasses
from collections.abc import Mapping

from hbf.data.images.sources import Source
from hbf.data.images.targets import CLASSES


@dataclasses.dataclass(frozen=True)
class Dataset:
  """Images with their targets, which are what a network learns to predict.

  Attributes:
    name: name of the data set.
    classes: the name of each class, as the data set stores it. If the targets are K labels or values, the name of
      each of them.
    image_shape: height, width and channels of every image.
    splits: the sources of examples, with the keys `train` and `test`, and `validation` if the data set has its own
      validation split. These are the keys even if the splits have other names in the data set. A source is an object
      with the methods of `hbf.data.images.sources.Source`.
    names: readable names of classes by stored name, for data sets whose stored names are ids such as n01443537.
    targets: the kind of the targets. 'classes': an example has a class, an index into `classes`. 'labels': it has K
      numbers that are 0 or 1. 'values': it has K numbers.
  """

  name: str
  classes: tuple[str, ...]
  image_shape: tuple[int, int, int]
  splits: Mapping[str, Source]
  names: Mapping[str, str] = dataclasses.field(default_factory=dict)
  targets: str = CLASSES

  @property
  def class_names(self) -> tuple[str, ...]:
    """A readable name of each class, label or value."""
    return tuple(self.names.get(name, name) for name in self.classes)
