"""A run's classifier in a folder of its own, for use elsewhere: with this code, or with JAX alone.

docs/predict.md has what is in the folder, and how it is read without this code.
"""

import dataclasses
import hashlib
import json
import pathlib
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import safetensors.numpy
from flax.traverse_util import flatten_dict, unflatten_dict
from ml_collections import ConfigDict

from hbf.data.augment.batches import normalize
from hbf.data.datasets import Dataset
from hbf.errors import UserError
from hbf.interop import tensors
from hbf.interop.table import misfits
from hbf.models.build import abstract_params, build_model
from hbf.training.evaluate import restore
from hbf.training.schema import GONE, RENAMED, current
from hbf.training.schema import VERSION as SCHEMA
from hbf.training.workdir import damaged, load_config, read_data, read_json, write_json

FORMAT, VERSION = 'hbf classifier', 1
CONFIG, TENSORS, PROGRAM = 'config.json', 'model.safetensors', 'program.jax'
PLATFORMS = ('cpu', 'cuda', 'tpu')

# Keys of config.json beside its format and version.
_SAID = {'task', 'dataset', 'classes', 'image_shape', 'mean', 'std', 'recipe', 'seed', 'step', 'average', 'schema'}
_SAID |= {'model', 'jax', 'sha256'}

Images = np.ndarray | jax.Array
Logits = Callable[[Mapping[str, Any], Images], jax.Array]


@dataclasses.dataclass(frozen=True)
class Trained:
  """A classifier, trained.

  Attributes:
    about: what an exported folder's config.json says of it, without what it says of the folder: task, dataset,
      classes (their names), image_shape (height, width, channels), mean and std (by channel, of 1 = white), recipe,
      seed, step, average (whether the parameters are their moving average), schema (version of the config's words)
      and model (that part of the config).
    params: by name, such as 'block0/stage1/out/kernel'.
    logits: (params, images uint8 [B, H, W, C]) → float32 [B, classes]; pure.
  """

  about: Mapping[str, Any]
  params: Mapping[str, Any]
  logits: Logits


def from_run(workdir: pathlib.Path, checkpoint: str = 'latest', average: bool = False) -> Trained:
  """The classifier of a run, on one device. The data set that it was trained on needn't be there.

  Args:
    workdir: of a run of task classification.
    checkpoint: 'latest', 'best' or a step.
    average: whether to take the moving average of the parameters.

  Raises:
    UserError: the folder isn't such a run's, doesn't say its classes, or has no such checkpoint.
  """
  config = load_config(workdir)
  if config.task != 'classification':
    raise UserError(f'{workdir} holds a run of task {config.task}: give one of classification, which answers images')
  dataset = stored_dataset(workdir)
  restored = restore(workdir, checkpoint, jax.devices()[:1], average, dataset)
  said = json.loads(restored.config.to_json())
  about = {
    'task': said['task'],
    'dataset': dataset.name,
    'classes': [*dataset.class_names],
    'image_shape': [*dataset.image_shape],
    'mean': said['data']['mean'],
    'std': said['data']['std'],
    'recipe': said['recipe'],
    'seed': said['seed'],
    'step': restored.step,
    'average': average,
    'schema': SCHEMA,
    'model': said['model'],
  }
  return trained(about, restored.params)


def stored_dataset(workdir: pathlib.Path) -> Dataset:
  """Return what a run of task classification knows of its data set: all but the images.

  Raises:
    UserError: the folder does not say.
  """
  data = read_data(workdir, 'name', 'classes', 'image_shape')
  if data is None:
    raise UserError(f'{workdir} has no data.json, which names the classes: it is of older code, train again')
  return Dataset(data['name'], tuple(data['classes']), tuple(data['image_shape']), {}, data.get('names', {}))


def trained(about: Mapping[str, Any], params: Any) -> Trained:
  """A classifier of parameters, nested as Flax has them; see `Trained`."""
  network, mean, std = _network(about), about['mean'], about['std']

  def logits(params: Mapping[str, Any], images: Images) -> jax.Array:
    variables = {'params': unflatten_dict(dict(params), sep='/')}
    return jnp.asarray(network.apply(variables, normalize(jnp.asarray(images), mean, std), train=False))

  return Trained(about, flatten_dict(params, sep='/'), logits)


def _network(about: Mapping[str, Any]) -> nn.Module:
  """The module that a config.json describes, in today's words."""
  config = ConfigDict(current({'version': about['schema'], 'model': about['model']})['model'])
  if 'implementation' in config.stage2:
    config.stage2.implementation = 'xla'  # the same sums; a Pallas kernel is of one platform and one number of images
  return build_model(config, len(about['classes']))


def export(model: Trained, folder: pathlib.Path) -> None:
  """Writes a classifier into a folder that isn't there, or is empty. It is there whole, or not at all.

  Raises:
    UserError: something is there, or the folder can't be written.
  """
  check_free(folder)
  params = {name: np.asarray(param, order='C') for name, param in model.params.items()}
  files = {
    TENSORS: safetensors.numpy.save(params, {'format': FORMAT, 'version': str(VERSION)}),
    PROGRAM: bytes(_program(model).serialize()),
  }
  sums = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
  said = {'format': FORMAT, 'version': VERSION, **model.about, 'jax': jax.__version__, 'sha256': sums}
  folder = folder.absolute()
  try:
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f'.{folder.name}.', dir=folder.parent) as temporary:
      made = pathlib.Path(temporary) / folder.name
      made.mkdir()  # of the usual permissions, which the one around it hasn't
      for name, content in files.items():
        (made / name).write_bytes(content)
      write_json(made / CONFIG, said)
      made.rename(folder)
  except OSError as error:
    raise UserError(f'{folder} could not be written ({error}): make room, or choose another --export') from error


def check_free(folder: pathlib.Path) -> None:
  """Check that an export writes over nothing.

  Raises:
    UserError: the folder holds something.
  """
  if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
    raise UserError(f'{folder} exists and is not an empty folder: choose another folder, or remove it')


def _program(model: Trained) -> jax.export.Exported:
  """The logits as a program of any number of images, for every platform."""
  shape = ', '.join(('b', *map(str, model.about['image_shape'])))
  images = jax.ShapeDtypeStruct(jax.export.symbolic_shape(shape), jnp.uint8)
  params = {name: jax.ShapeDtypeStruct(param.shape, param.dtype) for name, param in model.params.items()}
  return jax.export.export(jax.jit(model.logits), platforms=PLATFORMS)(params, images)


def read_about(folder: pathlib.Path) -> dict[str, Any]:
  """Return what an exported folder's config.json says, see `Trained`.

  Raises:
    UserError: the folder is no export, or one of a version that this code doesn't know.
  """
  path, expected = folder / CONFIG, 'expected a folder that hbf.cli.predict --export has written'
  again = 'export it again'
  said = read_json(path, again)
  if said is None:
    raise UserError(f'{path} is missing: {expected}')
  if said.get('format') != FORMAT:
    cure = ', or the folder of a run as --workdir' if (folder / 'checkpoints').exists() else ''
    raise UserError(f'{path} is not that of an exported model: {expected}{cure}')
  if said.get('version') != VERSION:
    raise UserError(
      f'{path} is of version {said.get("version")}, this code reads version {VERSION}: '
      'export it again by this code, or read it by the code that wrote it'
    )
  if missing := sorted(_SAID - said.keys()):
    raise damaged(path, f'it lacks {", ".join(missing)}', again)
  return said


def load_program(folder: pathlib.Path) -> Callable[[Images], jax.Array]:
  """The function of an exported folder, uint8 [b, H, W, C] → float32 logits [b, classes], for any b.

  It is what was exported: no code of this project computes it, and a later one's changes don't reach it.

  Raises:
    UserError: as `read_about`; a file is missing or damaged, or this JAX can't read the program.
  """
  about = read_about(folder)
  params, path = _read_params(folder, about), _checked(folder, about, PROGRAM)
  try:
    program = jax.export.deserialize(bytearray(path.read_bytes()))
  except Exception as error:  # whatever a reader of another version stumbles on
    raise UserError(
      f'{path} can not be read by JAX {jax.__version__} ({error}); it was written by {about["jax"]}: '
      'export it again, or load it by hbf.training.export.load_model'
    ) from error
  expected = (*about['image_shape'], len(about['classes']))
  if (*program.in_avals[-1].shape[1:], *program.out_avals[0].shape[1:]) != expected:
    raise UserError(f'{folder / CONFIG} has other classes or another image_shape than {PROGRAM}: export it again')
  call = jax.jit(program.call)
  return lambda images: call(params, images)


def load_model(folder: pathlib.Path) -> tuple[nn.Module, dict[str, Any], dict[str, Any]]:
  """Module, variables and config.json of an exported folder.

  The module takes normalized images, `hbf.data.augment.batches.normalize(images, about['mean'], about['std'])`.

  Raises:
    UserError: as `read_about`; a file is missing or damaged, or its parameters aren't the model's.
  """
  about = read_about(folder)
  try:
    model = _network(about)
  except UserError as error:
    raise UserError(f'{folder / CONFIG}: {error}') from None
  params = {_todays(name): param for name, param in _read_params(folder, about).items() if name not in GONE}
  wanted = flatten_dict(abstract_params(model, tuple(about['image_shape'])), sep='/')
  found, expected = ({name: param.shape for name, param in named.items()} for named in (params, wanted))
  if faults := misfits(found, expected, most=6):
    raise UserError(f'{folder / TENSORS} does not hold the model that {CONFIG} describes ({faults}): export it again')
  return model, {'params': unflatten_dict(params, sep='/')}, about


def _todays(name: str) -> str:
  """Return the name that a parameter, such as 'block0/stage2/centers', has today."""
  path, slash, last = name.rpartition('/')
  return path + slash + RENAMED.get(last, last)


def _read_params(folder: pathlib.Path, about: Mapping[str, Any]) -> dict[str, jax.Array]:
  return {name: jnp.asarray(param) for name, param in tensors.read(_checked(folder, about, TENSORS)).items()}


def _checked(folder: pathlib.Path, about: Mapping[str, Any], name: str) -> pathlib.Path:
  """Where a file is that has the checksum that config.json says."""
  path = folder / name
  try:
    found = _sum(path)
  except OSError as error:
    raise UserError(f'{path} can not be read ({error.strerror}): export the model again') from error
  if found != about['sha256'].get(name):
    raise UserError(f'{path} is not what was exported (its SHA-256 is not that in {CONFIG}): export the model again')
  return path


def _sum(path: pathlib.Path) -> str:
  with open(path, 'rb') as file:
    return hashlib.file_digest(file, 'sha256').hexdigest()
