"""The schema of configs. It translates the configs of older runs into the keys of this code.

config.json has the version number of its keys. If an option is new, renamed or removed, the newest `Change` has a
line about it. So old runs are evaluated as they were trained, and can continue. A few values differ from older code
but have no option: the learning rates and the weight decay of `memory_*` and `beta` parameters, and the constant β2
of lion. An older run continues with this code's values.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict

from hbf.config.defaults import IMAGE_TASKS
from hbf.errors import UserError
from hbf.nn.registry import stage_names
from hbf.ops.kernels import SIGNED

STAGES = ('model.stage1', 'model.stage2')
Keys = Mapping[str, Mapping[str, Any]]


@dataclasses.dataclass(frozen=True)
class Change:
  """The changes of options from one version of the keys to the next.

  Each attribute is a dict whose keys name parts of the config. '' stands for the options outside of all sections, and
  'model' for those of this section. 'model.stage2:hyperbf' stands for the options of stage 2, but only in configs
  whose stage 2 is of the kind hyperbf.

  Attributes:
    renamed: dicts from the old name of an option to its new name.
    removed: for each removed option, the value with which it had no effect. Any other value is an error.
    added: for each new option, the value that reproduces the earlier behavior.
    added_to_images: like `added`, for options that only runs on images have.
    rewritten: functions that change the options of a part in place, for other changes.
  """

  renamed: Keys = dataclasses.field(default_factory=dict)
  removed: Keys = dataclasses.field(default_factory=dict)
  added: Keys = dataclasses.field(default_factory=dict)
  added_to_images: Keys = dataclasses.field(default_factory=dict)
  rewritten: Mapping[str, Callable[[dict[str, Any]], None]] = dataclasses.field(default_factory=dict)


def _name_transforms(data: dict[str, Any]) -> None:
  """Replace the keys `flip` and `crop` by the tuple `transforms`."""
  flip, crop = data.pop('flip', False), data.pop('crop', 0)
  data.setdefault('transforms', (('flip',),) * flip + (('shift', crop),) * bool(crop))


def _state_beta(stage2: dict[str, Any]) -> None:
  """Replace the value 'signed' of `widths` by the kernel for which it stood, signed_gaussian with a free β."""
  if stage2.get('widths') == 'signed':
    stage2.update(kernel=SIGNED, widths='centre')


def _state_norm(stage: dict[str, Any], option: str) -> None:
  """Turn an option into a boolean: False if its value is 'none', True if it is 'unit'."""
  if option in stage:
    stage[option] = stage[option] in ('unit', True)


def _name_positions(stage1: dict[str, Any]) -> None:
  """Rename the relative positions 'offsets' to 'gaussian'. Make `qk_norm` a boolean."""
  if stage1.get('relative_positions') == 'offsets':
    stage1['relative_positions'] = 'gaussian'
  _state_norm(stage1, 'qk_norm')


def _name_implementation(stage2: dict[str, Any]) -> None:
  """Rename implementation='blocks' to 'xla', sigma_per='centre' to 'center'. Make `normalize_inputs` a boolean."""
  if stage2.get('implementation') == 'blocks':
    stage2['implementation'] = 'xla'
  if stage2.get('sigma_per') == 'centre':
    stage2['sigma_per'] = 'center'
  _state_norm(stage2, 'normalize_inputs')


def _name_loggers(log: dict[str, Any]) -> None:
  """Replace the flag `tensorboard` by the list `to`."""
  log.setdefault('to', 'tensorboard' if log.pop('tensorboard', False) else '')


def _name_stage(model: dict[str, Any]) -> None:
  """Rename stage 1 'places' to 'positional'."""
  first, plus, second = model['name'].partition('+')
  if plus and first == 'places':
    model['name'] = f'positional+{second}'


def _list_merges(model: dict[str, Any]) -> None:
  """Turn `merge` from a block, or 0 for none, into a tuple of blocks."""
  if isinstance(model.get('merge'), int):
    model['merge'] = (model['merge'],) if model['merge'] else ()


def _choose_parts(train: dict[str, Any]) -> None:
  """Replace `accumulate` = 1, the former default, by 0. A continued run computes the same, except for rounding."""
  if train.get('accumulate') == 1:
    train['accumulate'] = 0


_SIGMA = {'widths': 'sigma_per', 'width_scale': 'sigma_scale'}
_POSITIONS = {'places': 'relative_positions'}

CHANGES = (
  # To version 1, from all that was written before configs carried a version.
  Change(
    renamed={
      'model.stage1:hyperbf': {'width': 'widths'},
      'model.stage2:hyperbf': {'width': 'widths'},
      'model.stage1:linear': {'rank': 'random_features'},
    },
    removed={'model.stage2:hyperbf': {'nearest': 0}},
    added={
      '': {'init_from': ''},
      'model': {
        'norm_epsilon': 1e-6,
        'scan_layers': False,
        'remat': False,
        'parallel': False,
        'layer_scale': 0.0,
        'drop_path': 0.0,
      },
      'model.stage1:softmax': {'qk_norm': 'none', 'qkv_bias': False},
      'model.stage2:mlp': {'output_scale': 1.0},
      'model.stage2:hyperbf': {'nested': False},
      'data': {'test_split': 'test'},
      'train': {'steps_per_call': 1},
      'optimizer': {'centre_rate': 1.0},
    },
  ),
  # To version 2.
  Change(added={f'model.stage1:{stage}': {'places': 'none'} for stage in ('hyperbf', 'softmax')}),
  # To version 3.
  Change(
    added={
      'model': {'stem': 'patch'},
      'data': {'mix': ()},
      'train': {'average': 0.0},
      'optimizer': {'layer_decay': 1.0, 'minimum_rate': 0.0},
    },
    rewritten={'data': _name_transforms},
  ),
  # To version 4.
  Change(added={'mesh': {'data': -1, 'fsdp': 1, 'tensor': 1}}),
  # To version 5.
  Change(added={'model.stage2:hyperbf': {'norm': 'none'}}),
  # To version 6.
  Change(
    added={'model.stage2:hyperbf': {'norm_affine': True}},
    removed={'model.stage1:linear': {'causal': False}},
  ),
  # To version 7.
  Change(added={'': {'task': 'classification'}}),
  # To version 8.
  Change(
    added={
      'model.stage2:mlp': {'normalize': False},
      'optimizer': {'matrix_momentum': 0.95},
    },
    added_to_images={'model': {'merge': 0}},
  ),
  # To version 9.
  Change(
    added={
      'optimizer': {'decay': '20%'},
      **{
        f'model.stage1:{stage}': {'mimetic': 0.0}
        for stage in ('hyperbf', 'gated_hyperbf', 'softmax', 'gated_softmax')
      },
    },
    added_to_images={'model': {'whiten': False}, 'evaluate': {'copies': 'none'}},
  ),
  # To version 10.
  Change(added_to_images={'data': {'stratify': False}}),
  # To version 11.
  Change(rewritten={'model.stage2:hyperbf': _state_beta}),
  # To version 12: American spelling, and one word for one thing.
  Change(
    renamed={
      'model.stage1:hyperbf': _SIGMA | _POSITIONS,
      'model.stage1:gated_hyperbf': _SIGMA | _POSITIONS,
      'model.stage1:softmax': _POSITIONS,
      'model.stage1:gated_softmax': _POSITIONS,
      'model.stage1:linear': {'normaliser': 'normalizer'},
      'model.stage2:hyperbf': _SIGMA
      | {
        'centres': 'centers',
        'centres_init': 'centers_init',
        'form': 'implementation',
        'norm': 'normalize_inputs',
        'normalisation': 'normalization',
      },
      'optimizer': {'centre_rate': 'center_rate', 'width_rate': 'sigma_rate'},
    },
    rewritten={
      'model.stage1:hyperbf': _name_positions,
      'model.stage1:gated_hyperbf': _name_positions,
      'model.stage1:softmax': _name_positions,
      'model.stage1:gated_softmax': _name_positions,
      'model.stage2:hyperbf': _name_implementation,
    },
  ),
  # To version 13.
  Change(added={'model.stage2:hyperbf': {'radius': 'absolute', 'coefficients': 'constant'}}),
  # To version 14.
  Change(added={'log': {'units': False}}),
  # To version 15.
  Change(added_to_images={'data': {'validation_split': ''}}),
  # To version 16.
  Change(
    added={
      'log': {'profile': ''},
      'train': {'patience': 0, 'teacher': '', 'teacher_weight': 0.0, 'temperature': 2.0},
      'optimizer': {'cycles': 4, 'cycle_growth': 1.0, 'sam': 0.0, 'skip': 0},
      'checkpoint': {'rank': 'parameters'},
    },
    added_to_images={'data': {'balance': ''}},
    rewritten={'log': _name_loggers},
  ),
  # To version 17.
  Change(
    added={
      'log': {'noise_scale': False},
      'optimizer': {'plateau_factor': 0.1, 'plateau_patience': 5},
    },
    added_to_images={'data': {'columns': '', 'cache': ''}},
  ),
  # To version 18. Runs on images have these options already.
  Change(added={'data': {'input': 'auto', 'resident_bytes': 2_000_000_000, 'cache': ''}}),
  # To version 19.
  Change(rewritten={'model': _name_stage}),
  # To version 20.
  Change(rewritten={'model': _list_merges}),
  # To version 21.
  Change(
    added={'model.stage1:convolution': {'filters_init': 'normal'}},
    added_to_images={'model': {'window': 0}},
  ),
  # To version 22.
  Change(rewritten={'train': _choose_parts}),
)
VERSION = len(CHANGES)

# The removed parameters, with their shapes. Older code had them, so old checkpoints and exported models hold them.
# None of them changed an output.
GONE = {'pool/bias': (1,)}  # the softmax over the tokens cancels it
# The new name of each renamed parameter by its old name. A name is the last part of a path. Old checkpoints and
# exported models have the old names.
RENAMED = {
  'centres': 'centers',
  'memory_centres': 'memory_centers',
  'log_width': 'log_sigma',
  'place_offset': 'position_offset',
  'place_log_width': 'position_log_sigma',
}


def stamp(config: Mapping[str, Any]) -> dict[str, Any]:
  """Return the content of config.json for a nested config: the config and the version of its keys."""
  return {'version': VERSION, **config}


def current(stored: Mapping[str, Any], changes: tuple[Change, ...] = CHANGES) -> dict[str, Any]:
  """Return the nested config of a config.json, translated to the keys of this code.

  A JSON file has lists where a config has tuples, so each list becomes a tuple.

  Args:
    stored: the content of config.json, which is not changed.
    changes: the changes of the schema, from version 0 on.

  Raises:
    UserError: the config has a newer version, or uses an option that was removed.
  """
  config = _copied(stored)
  version = config.pop('version', 0)
  if version > len(changes):
    raise UserError(
      f'its config is of version {version}, this code knows versions up to {len(changes)}: update the code'
    )
  for change in changes[version:]:
    _apply(change, config)
  return config


def with_gone(params: Mapping[str, Any]) -> dict[str, Any] | None:
  """Return the shapes of the parameters that older code had for a network: `params`, and those in `GONE`.

  Return None if `GONE` has no parameters of this network.
  """
  found = {name: shape for name, shape in GONE.items() if name.partition('/')[0] in params}
  if not found:
    return None
  gone = {tuple(name.split('/')): jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in found.items()}
  return unflatten_dict(flatten_dict(params) | gone)


def renamed(tree: Any, names: Mapping[str, str]) -> Any:
  """Return a tree of dicts and tuples, such as an optimizer's state, with renamed keys.

  Args:
    tree: parameters, or a tree that contains them.
    names: the new keys by the old keys. Other keys stay.
  """
  if isinstance(tree, Mapping):
    return {names.get(key, key): renamed(value, names) for key, value in tree.items()}
  if isinstance(tree, tuple):
    parts = [renamed(part, names) for part in tree]
    return type(tree)(*parts) if hasattr(tree, '_fields') else tuple(parts)
  return tree


def old_names(held: Iterable[str]) -> dict[str, str]:
  """Return a dict from new to old names, for the parameters that a checkpoint has under their old names.

  `held` are the paths of the checkpoint's parameters.
  """
  last = {path.rpartition('/')[2] for path in held}
  return {new: old for old, new in RENAMED.items() if old in last}


def _apply(change: Change, config: dict[str, Any]) -> None:
  for part, names in change.renamed.items():
    options = _options(config, part)
    for old, new in names.items():
      if old in options:
        options[new] = options.pop(old)
  for part, idle in change.removed.items():
    options = _options(config, part)
    for key, value in idle.items():
      if (found := options.pop(key, value)) != value:
        name = f'{part.partition(":")[0]}.{key}'.lstrip('.')
        raise UserError(f'its config has {name}={found!r}, an option that is gone: use the code that trained it')
  images = change.added_to_images if config.get('task') in IMAGE_TASKS else {}
  for part, values in (*change.added.items(), *images.items()):
    options = _options(config, part)
    for key, value in values.items():
      options.setdefault(key, value)
  for part, rewrite in change.rewritten.items():
    rewrite(_options(config, part))


def _options(config: dict[str, Any], part: str) -> dict[str, Any]:
  """Return the options of a part (see `Change`), to be changed in place. {} if the stage is of another kind."""
  path, _, stage = part.partition(':')
  if stage and stage != dict(zip(STAGES, stage_names(config['model']['name']), strict=True))[path]:
    return {}
  for section in filter(None, path.split('.')):
    config = config.setdefault(section, {})
  return config


def _copied(value: Any) -> Any:
  """Return a copy of a value in which each list is a tuple, also inside dicts and lists."""
  if isinstance(value, Mapping):
    return {key: _copied(part) for key, part in value.items()}
  return tuple(map(_copied, value)) if isinstance(value, list | tuple) else value
