"""The config of each data set. `cifar10(arguments)` returns the config that --config=cifar10:ARGUMENTS gives.

ARGUMENTS are model=…,recipe=…,size=…,task=…. Each of the four may be left out.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

from ml_collections import ConfigDict

from hbf.config.defaults import SECTIONS
from hbf.config.recipes import make_config, make_text_config
from hbf.data import registry
from hbf.data.registry import Opener, Registered
from hbf.errors import UserError, choose, first_line


def digits(arguments: str = '') -> ConfigDict:
  """Return the config of the handwritten digits of scikit-learn: 1,797 gray images of 8×8, 10 classes."""
  return make_config(
    arguments,
    # There is no flip, because mirrored digits are not digits.
    {'name': 'digits', 'transforms': (('shift', 1),), 'validation': 0.1},
    model={'patch': 4, 'depth': 2},  # more blocks are not more accurate here, and a first run should be short
    train={'epochs': 40.0, 'batch_size': 64, 'steps_per_call': 10},  # steps take milliseconds, even on a CPU
    evaluate={'every': '10epochs'},
    checkpoint={'every': '10epochs'},
  )


def cifar10(arguments: str = '') -> ConfigDict:
  """Return the config of CIFAR-10: 32×32 photographs, 10 classes, 50,000 to train on and 10,000 to test on."""
  return make_config(arguments, {'name': 'cifar10'})


def cifar100(arguments: str = '') -> ConfigDict:
  """Return the config of CIFAR-100: 32×32 photographs, 100 classes, 50,000 to train on and 10,000 to test on."""
  return make_config(arguments, {'name': 'cifar100'})


def tiny_imagenet(arguments: str = '') -> ConfigDict:
  """Return the config of Tiny ImageNet: 64×64 photographs, 200 classes, 100,000 to train on and 10,000 to test on."""
  return make_config(arguments, {'name': 'tiny_imagenet'}, model={'patch': 8})  # patches as in the memo


def imagenet(arguments: str = '') -> ConfigDict:
  """Return the config of ImageNet (ILSVRC 2012) as TFDS prepares it.

  It has 1,000 classes, 1,281,167 photographs to train on and 50,000 to test on. The default recipe is `plain`.
  Processes on the hosts decode the images, resize the shorter side to 224 pixels and cut out the square in the
  center. Random crops are cut out of these squares in the compiled training step.
  """
  return make_config(
    f'recipe=plain,{arguments}',
    # A core reads 300 images a second (docs/research/speed.md). Set as many processes as the host has free cores.
    {'name': 'imagenet2012', 'test_split': 'validation', 'image_size': 224, 'input': 'stream', 'workers': 16},
    model={'patch': 16},
  )


def image_folder(arguments: str = '') -> ConfigDict:
  """Return the config of your own images: data.root is a folder with train/CLASS/* and test/CLASS/*.

  With task=multi_label or task=regression, each split has a file labels.csv or targets.csv instead of class folders.
  """
  return make_config(arguments, {'name': 'image_folder', **_OWN_IMAGES}, model={'patch': 8})


def parquet(arguments: str = '') -> ConfigDict:
  """Return the config of your own images in Parquet files, as the library `datasets` of Hugging Face stores them.

  data.root is a folder with train-*.parquet and test-*.parquet.
  """
  return make_config(arguments, {'name': 'parquet', **_OWN_IMAGES}, model={'patch': 8})


def webdataset(arguments: str = '') -> ConfigDict:
  """Return the config of your own images in tar files: data.root is a folder with train-*.tar and test-*.tar."""
  return make_config(arguments, {'name': 'webdataset', **_OWN_IMAGES}, model={'patch': 8})


def array_files(arguments: str = '') -> ConfigDict:
  """Return the config of your own images in a .npz file of arrays: data.root is the file."""
  return make_config(arguments, {'name': 'array_files', 'validation': 0.1, 'stratify': True})


def arrays(arguments: str = '') -> ConfigDict:
  """Return the config of your own images in memory, given as `hbf.ArrayData`."""
  return make_config(arguments, {'name': 'arrays', 'validation': 0.1, 'stratify': True})


def text(arguments: str = '') -> ConfigDict:
  """Return the config of Python's language reference: half a million characters. The text comes with Python."""
  return make_text_config(arguments, {'name': 'python'})


def shakespeare(arguments: str = '') -> ConfigDict:
  """Return the config of tiny Shakespeare: a million characters. The last tenth is the test text, as in nanoGPT."""
  return make_text_config(arguments, {'name': 'tiny_shakespeare', 'test_split': 'validation+test'})


def text_file(arguments: str = '') -> ConfigDict:
  """Return the config of your own text: data.root is a file, or a folder of files that are joined to one text."""
  return make_text_config(arguments, {'name': 'text_file'})


_OWN_IMAGES = {'image_size': 64, 'validation': 0.1, 'stratify': True}
_ALL = (digits, cifar10, cifar100, tiny_imagenet, imagenet, image_folder, parquet, webdataset, array_files, arrays)
DATASETS: dict[str, Callable[..., ConfigDict]] = {
  make.__name__: make for make in (*_ALL, text, shakespeare, text_file)
}


def register_dataset(name: str, open: Opener, *, text: bool = False, **defaults: Mapping[str, Any]) -> None:
  """Register a data set of your own, so that configs, commands and functions know its name.

  Call `register_dataset` at the top level of a file NAME.py, where NAME is the name of the data set. Commands, and
  processes that read images, import this file from the folder in which they run. docs/how-to/own-formats.md has an
  example.

  Args:
    name: the name, a word that may have digits and underscores. An earlier data set of yours with this name is
      replaced.
    open: a function that opens the data set. Its argument is an `hbf.DataRequest`, which has keys of the config such
      as `root`. For images, the function returns `hbf.Dataset` or `hbf.ArrayData`. For texts, it returns a str or
      bytes, or a dict of the texts `train` and `test`.
    text: True for a text, False for images.
    **defaults: default values of config keys for this data set, by section, such as model={'patch': 8}.

  Raises:
    ValueError: the name is not a word, or is the name of a data set of this package. Or `open` is not a function, or
      a default is not a dict of values for a section of the config.
  """
  if not isinstance(name, str) or not re.fullmatch(r'[a-zA-Z]\w*', name) or name in DATASETS:
    raise UserError(f'name is {name!r}: expected a word that is no data set of the package ({", ".join(DATASETS)})')
  if not callable(open):
    raise UserError(f'open is {open!r}: expected a function that returns the data set')
  for section, values in defaults.items():
    if section not in SECTIONS or not isinstance(values, Mapping):
      raise UserError(
        f"{section} is {values!r}: expected values of keys by section, such as model={{'patch': 8}}; sections: "
        f'{", ".join(SECTIONS)}'
      )
  registry.REGISTERED[name] = Registered(open, text, defaults)


def get_config(config: str) -> ConfigDict:
  """Return the config of a data set.

  Args:
    config: the name of a data set, such as 'cifar10' or one that you have registered (`register_dataset`). Arguments
      may follow after a colon: NAME:model=…,recipe=…,size=…,task=…. Each of the arguments may be left out.

  Raises:
    UserError: the data set, an argument or a value is unknown.
  """
  name, _, arguments = config.partition(':')
  own = None if name in DATASETS else registry.find(name)
  if own is None:
    return choose('data set', name, DATASETS)(arguments)
  make = make_text_config if own.text else make_config
  sections = {section: dict(values) for section, values in own.defaults.items()}
  try:
    return make(arguments, {'name': name, **sections.pop('data', {})}, **sections)
  except UserError:
    raise
  except (TypeError, ValueError, KeyError, AttributeError) as error:
    raise UserError(f'the defaults of {name} are wrong ({first_line(error)}): correct register_dataset') from error
