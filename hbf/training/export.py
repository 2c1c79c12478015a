"""The export of a run's network for images to a folder, for use with this package or with JAX alone.

docs/how-to/export.md describes the folder, and how to read it without this package.
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
from hbf.data.images.files import file_sha256
from hbf.errors import UserError, choose
from hbf.interop import tensors
from hbf.interop.table import misfits, shapes_of
from hbf.models.build import abstract_params, build_model, unrolled
from hbf.models.edited import EditedClassifier
from hbf.tasks.images import ImageTask
from hbf.tasks.registry import TASKS
from hbf.training.restore import check_on_images, restore, stored_dataset, with_edits
from hbf.training.schema import GONE, RENAMED, current
from hbf.training.schema import VERSION as SCHEMA
from hbf.training.workdir import check_kinds, check_shape, damaged, read_json, write_json

FORMAT, VERSION = 'hbf classifier', 1
CONFIG, TENSORS, PROGRAM = 'config.json', 'model.safetensors', 'program.jax'
PLATFORMS = ('cpu', 'cuda', 'tpu')

# Keys of config.json beside its format and version.
_KEYS = {'task', 'dataset', 'classes', 'image_shape', 'mean', 'std', 'recipe', 'seed', 'step', 'average', 'schema'}
_KEYS |= {'model', 'jax', 'sha256'}

Images = np.ndarray | jax.Array
Logits = Callable[[Mapping[str, Any], Images], jax.Array]


@dataclasses.dataclass(frozen=True)
class TrainedClassifier:
  """A trained network for images.

  Attributes:
    about: the description of the classifier, as in an exported folder's config.json (docs/how-to/export.md). Its keys
      are task, dataset, classes (a list of names), image_shape (height, width, channels), mean and std (a number for
      each channel, where white is 1), recipe, seed, step, average (True if `params` is a moving average), schema (the
      version of the config's keys) and model (the `model` part of the config). An edited classifier also has edits,
      the number of edits. A network of task regression also has target_mean and target_std, a number for each target.
    params: the parameters by name, such as 'block0/stage1/out/kernel'.
    logits: a pure function (params, images uint8 [B, H, W, C]) → float32 [B, classes]. The result has the
      logits of classes or labels, or values in the units of the targets.
  """

  about: Mapping[str, Any]
  params: Mapping[str, Any]
  logits: Logits


def from_run(
  workdir: pathlib.Path, checkpoint: str = 'latest', average: bool = False, edits: bool = False
) -> TrainedClassifier:
  """Return the network of a run, on one device. The data set is not needed.

  Args:
    workdir: the run folder of a run on images.
    checkpoint: 'latest', 'best' or a step.
    average: True to take the moving average of the parameters.
    edits: True to apply the run's edits.

  Raises:
    UserError: the folder has no run on images, no names of the classes, no such checkpoint, or no edits
      for this checkpoint.
  """
  check_on_images(workdir)
  dataset = stored_dataset(workdir)
  restored = restore(workdir, checkpoint, jax.devices()[:1], average, dataset)
  if edits:
    restored = with_edits(restored, workdir, average)
  assert isinstance(restored.task, ImageTask)
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
    **restored.task.about(),
    **({'edits': restored.model.edits} if edits else {}),
  }
  return trained(about, restored.params)


def trained(about: Mapping[str, Any], params: Any) -> TrainedClassifier:
  """Return the classifier that `about` describes (see `TrainedClassifier`). `params` are nested, as in Flax."""
  network, mean, std = _network(about), about['mean'], about['std']

  def logits(params: Mapping[str, Any], images: Images) -> jax.Array:
    variables = {'params': unflatten_dict(dict(params), sep='/')}
    outputs = jnp.asarray(network.apply(variables, normalize(jnp.asarray(images), mean, std), train=False))
    return image_task(about).outputs(outputs, about)

  return TrainedClassifier(about, flatten_dict(params, sep='/'), logits)


def image_task(about: Mapping[str, Any]) -> type[ImageTask]:
  """Return the class of the task that an exported config.json names.

  Raises:
    UserError: the task is not on images.
  """
  return choose('task', about['task'], {name: kind for name, kind in TASKS.items() if issubclass(kind, ImageTask)})


def model_config(about: Mapping[str, Any]) -> ConfigDict:
  """Return the `model` part of an exported config.json, translated to the keys of this code, for any platform."""
  config = ConfigDict(current({'version': about['schema'], 'model': about['model']})['model'])
  if 'implementation' in config.stage2:
    config.stage2.implementation = 'xla'  # the same sums; a Pallas kernel is for TPUs and one number of images
  return config


def _network(about: Mapping[str, Any]) -> nn.Module:
  """Return the module that an exported config.json describes."""
  model = build_model(model_config(about), len(about['classes']))
  return EditedClassifier(unrolled(model), about['edits']) if about.get('edits') else model


def export(model: TrainedClassifier, folder: pathlib.Path) -> None:
  """Write a classifier to a new or empty folder. After an error, no incomplete folder is left.

  Raises:
    UserError: the folder is not empty, or can't be written.
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
      made.mkdir()  # with the usual permissions, unlike the temporary folder around it
      for name, content in files.items():
        (made / name).write_bytes(content)
      write_json(made / CONFIG, said)
      made.rename(folder)
  except OSError as error:
    raise UserError(f'{folder} could not be written ({error}): make room, or choose another folder') from error


def check_free(folder: pathlib.Path) -> None:
  """Check that an export to this folder overwrites nothing.

  Raises:
    UserError: the folder is not empty.
  """
  if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
    raise UserError(f'{folder} exists and is not an empty folder: choose another folder, or remove it')


def _program(model: TrainedClassifier) -> jax.export.Exported:
  """Return the program that computes the logits, exported for any number of images and for all of PLATFORMS."""
  shape = ', '.join(('b', *map(str, model.about['image_shape'])))
  images = jax.ShapeDtypeStruct(jax.export.symbolic_shape(shape), jnp.uint8)
  params = {name: jax.ShapeDtypeStruct(param.shape, param.dtype) for name, param in model.params.items()}
  return jax.export.export(jax.jit(model.logits), platforms=PLATFORMS)(params, images)


def is_export(folder: pathlib.Path) -> bool:
  """Return True if the config.json of a folder is that of an exported model, of any version."""
  said = read_json(folder / CONFIG, 'restore it from a copy')
  return said is not None and said.get('format') == FORMAT


def read_about(folder: pathlib.Path) -> dict[str, Any]:
  """Return the description in an exported folder's config.json, see `TrainedClassifier`.

  Raises:
    UserError: the folder is not an export, or this code does not know its version.
  """
  path, expected = folder / CONFIG, 'expected a folder that hbf export has written'
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
  if missing := sorted(_KEYS - said.keys()):
    raise damaged(path, f'it lacks {", ".join(missing)}', again)
  kinds: dict[str, type] = {'classes': list, 'mean': list, 'std': list, 'step': int, 'average': bool, 'model': dict}
  check_kinds(said, path, again, sha256=dict, schema=int, jax=str, **kinds)
  check_shape(said['image_shape'], path, again)
  return said


def load_program(folder: pathlib.Path) -> Callable[[Images], jax.Array]:
  """Return a function from uint8 images [b, H, W, C] to float32 logits [b, classes], from an exported folder.

  b may differ between calls. The function runs the exported program, so later changes of this package do not change
  its results.

  Raises:
    UserError: see `read_about`. Also: a file is missing or damaged, or this version of JAX can't read the program.
  """
  about = read_about(folder)
  params, path = _read_params(folder, about), _checked(folder, about, PROGRAM)
  try:
    program = jax.export.deserialize(bytearray(path.read_bytes()))
  except Exception as error:  # a reader of another version raises errors of many types
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
  """Return the module, the variables and the config.json of an exported folder.

  The module takes normalized images. `hbf.data.augment.batches.normalize` normalizes images with the mean and std in
  config.json.

  Raises:
    UserError: see `read_about`. Also: a file is missing or damaged, or the parameters do not fit the model.
  """
  about = read_about(folder)
  try:
    model = _network(about)
    wanted = abstract_params(model, tuple(about['image_shape']))
  except UserError as error:
    raise UserError(f'{folder / CONFIG}: {error}') from None
  except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:
    reason = f'it describes no network: {" ".join(str(error).split())[:200]}'
    raise damaged(folder / CONFIG, reason, 'export it again') from error
  params = {_current_name(name): param for name, param in _read_params(folder, about).items() if name not in GONE}
  if faults := misfits(shapes_of(params), shapes_of(wanted), most=6):
    raise UserError(f'{folder / TENSORS} does not hold the model that {CONFIG} describes ({faults}): export it again')
  return model, {'params': unflatten_dict(params, sep='/')}, about


def _current_name(name: str) -> str:
  """Return the current name of a parameter, such as 'block0/stage2/centers'. `name` may be from older code."""
  path, slash, last = name.rpartition('/')
  return path + slash + RENAMED.get(last, last)


def _read_params(folder: pathlib.Path, about: Mapping[str, Any]) -> dict[str, jax.Array]:
  return {name: jnp.asarray(param) for name, param in tensors.read(_checked(folder, about, TENSORS)).items()}


def _checked(folder: pathlib.Path, about: Mapping[str, Any], name: str) -> pathlib.Path:
  """Return the path of a file after checking its checksum against config.json."""
  path = folder / name
  try:
    found = file_sha256(path)
  except OSError as error:
    raise UserError(f'{path} can not be read ({error.strerror}): export the model again') from error
  if found != about['sha256'].get(name):
    raise UserError(f'{path} is not what was exported (its SHA-256 is not that in {CONFIG}): export the model again')
  return path
