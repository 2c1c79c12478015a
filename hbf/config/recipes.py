"""Recipes, sizes and named models. hbf/config/defaults.py has the defaults, ranges and meanings of all keys.

The data sets in hbf/config/datasets.py call `make_config`. On the command line, a user writes:

--config=cifar10:model=vit,recipe=memo            to choose the model, the recipe, the size or the task
--config.optimizer.learning_rate=3e-4             to set any key of hbf/config/defaults.py, or an option of a stage
"""

from collections.abc import Callable, Mapping
from typing import Any

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from hbf.config.defaults import IMAGE_TASKS, TEXT_TASKS, UNUSED, keys_of_task
from hbf.config.defaults import defaults as all_defaults
from hbf.errors import UserError, choose
from hbf.nn.registry import stage_options

# Width, depth, heads and expansion of the usual vision transformers (Touvron et al. 2021, Table 1; for `large`,
# Dosovitskiy et al. 2021, Table 1).
SIZES = {
  'tiny': (192, 12, 3, 4.0),
  'small': (384, 12, 6, 4.0),
  'base': (768, 12, 12, 4.0),
  'large': (1024, 24, 16, 4.0),
}
# The same numbers for gMLP (Liu et al. 2021, Table 1) and Mixer (Tolstikhin et al. 2021, Table 1). Both have no
# heads. The paper's d_ffn of gMLP is twice the number of units.
GMLP_SIZES = {'tiny': (128, 30, 1, 3.0), 'small': (256, 30, 1, 3.0), 'base': (512, 30, 1, 3.0)}
SIZES_OF = {
  'gmlp': GMLP_SIZES,
  'amlp': GMLP_SIZES,
  'mixer': {'small': (512, 8, 1, 4.0), 'base': (768, 12, 1, 4.0)},
}


def memo() -> ConfigDict:
  """Return the recipe of CBMM Memo 143 for CIFAR.

  It trains on the whole training set, without warm-up. No images are held out, so the last checkpoint is tested.
  """
  config = defaults()
  config.model.update(width=768, depth=4, heads=4)
  config.data.validation = 0.0
  config.train.update(epochs=100.0, batch_size=256)
  config.optimizer.update(learning_rate=1e-4, weight_decay=0.01, schedule='cosine', warmup='0steps', clip=0.0)
  config.model.expansion = 2.0  # 1,536 centers, close to the 1,500 of the authors' first version
  return config


# Options of stage 2 for high learning rates, at which normalized responses degenerate (docs/research/search.md).
_AT_HIGH_RATES = {'normalize_inputs': True, 'norm_affine': False, 'normalization': 'none', 'sigma_per': 'layer'}


def small() -> ConfigDict:
  """Return a recipe for short runs. A run takes minutes on two CPU cores."""
  config = defaults()
  # Positions are fixed, because a few epochs are too short to learn them from a start near 0.
  config.model.update(width=64, depth=4, heads=4, positions='sincos2d')
  config.optimizer.learning_rate = 2e-3
  config.train.update(epochs=3.0, batch_size=256)
  config.model.expansion = 4.0
  return config


def laptop() -> ConfigDict:
  """Return a recipe for CIFAR-10, for models of at most 0.3 M parameters. A run takes an hour on one CPU core."""
  config = small()
  config.model.update(heads=8, stem='conv', pool='sequence')
  config.stages.stage1 = {'relative_positions': 'gaussian'}
  config.stages.stage2 = _AT_HIGH_RATES
  config.optimizer.learning_rate = 8e-3  # the best for every model after two epochs, docs/research/search.md
  config.train.epochs = 20.0
  return config


def strong() -> ConfigDict:
  """Return a recipe for a GPU: 300 epochs of a model of 2.8 M parameters.

  It follows Lee et al. 2021, with RandAugment in place of their AutoAugment. The paper trains for 100 epochs and
  shows every image three times in each epoch, so 300 epochs here show as many images.
  """
  config = defaults()
  config.model.update(width=192, depth=9, heads=12, stem='conv', pool='sequence', positions='sincos2d')
  config.model.update(drop_path=0.1, dtype='bfloat16')
  config.stages.stage1 = {'relative_positions': 'gaussian'}
  config.data.transforms = (('flip',), ('shift', 4), ('rand_augment', 2, 9), ('erase', 0.25))
  config.data.mix = (('mixup', 1.0, 0.25), ('cutmix', 1.0, 0.25))
  config.train.update(epochs=300.0, batch_size=128, label_smoothing=0.1, average=0.9995)
  config.optimizer.update(warmup='10epochs', minimum_rate=0.01)
  config.model.expansion = 2.0
  return config


def finetune() -> ConfigDict:
  """Return a recipe that starts from weights of another project. The config key `init_from` names their file.

  The argument size=… of --config and the options of the model must describe the network in this file.
  """
  config = defaults()
  config.model.update(width=192, depth=12, heads=3, patch=16, drop_path=0.1)
  config.data.transforms = (('flip',), ('resized_crop', 0.4), ('rand_augment', 2, 9))
  config.data.mix = (('mixup', 0.8, 0.5), ('cutmix', 1.0, 0.5))
  config.train.update(epochs=20.0, batch_size=128, label_smoothing=0.1)
  config.optimizer.update(learning_rate=5e-4, warmup='10%', layer_decay=0.75, minimum_rate=0.01)
  config.model.expansion = 4.0
  return config


def plain() -> ConfigDict:
  """Return a recipe for ImageNet on accelerators: 90 epochs.

  It follows Beyer et al. 2022, "Better plain ViT baselines for ImageNet-1k". Their random crops cover 5% or more of a
  whole image. Here the random crops are cut out of a square of side `data.image_size`, and cover 25% or more of it.
  """
  config = defaults()
  config.model.update(width=768, depth=12, heads=12, patch=16, pool='mean', positions='sincos2d', dtype='bfloat16')
  config.data.transforms = (('flip',), ('resized_crop', 0.25), ('rand_augment', 2, 10))
  config.data.mix = (('mixup', 0.2, 1.0),)
  config.data.validation = 0.01
  config.train.update(epochs=90.0, batch_size=1024)
  config.optimizer.update(weight_decay=0.1, warmup='8epochs')
  config.model.expansion = 4.0
  return config


def characters() -> ConfigDict:
  """Return a recipe for texts whose tokens are characters. A run takes two minutes on two CPU cores.

  The recipe follows nanoGPT's run on a CPU (Karpathy 2023).
  """
  config = defaults('next_token')
  config.model.update(width=128, depth=4, heads=4)
  config.data.update(tokenizer='characters', length=64, validation=0.0)
  config.train.update(epochs=1.53, batch_size=12)  # 2,000 steps of tiny Shakespeare
  # These are nanoGPT's values, except its learning rate of 1e-3. Twice that rate is better for its GPT too.
  config.optimizer.update(learning_rate=2e-3, minimum_rate=0.1, warmup='100steps', weight_decay=0.1)
  config.optimizer.second_momentum = 0.99
  config.log.every = '100steps'
  # The options of recipe laptop. Relative positions matter most (docs/research/text.md).
  config.stages.stage1 = {'relative_positions': 'gaussian'}
  config.stages.stage2 = _AT_HIGH_RATES
  config.model.expansion = 4.0
  return config


RECIPES = {'memo': memo, 'small': small, 'laptop': laptop, 'strong': strong, 'finetune': finetune, 'plain': plain}
TEXT_RECIPES = {'characters': characters}


def defaults(task: str = 'classification') -> ConfigDict:
  """Return a config of a task with all defaults and an empty section `stages`.

  A recipe writes options for stage 1 and stage 2 into this section. `make_config` copies each option to the model's
  stage if the stage has such an option. Then it removes the section.
  """
  config = all_defaults(task)
  config.stages = ConfigDict({'stage1': {}, 'stage2': {}})
  return config


def named_options(name: str) -> dict[str, Any]:
  """Return the keys of section `model` that a model such as 'gmlp' sets, with their values. Most models set none.

  If a value is None, `resolve` replaces it.
  """
  # The published networks have no class token, and the layers that mix tokens know the positions.
  patches_only = {'pool': 'mean', 'positions': 'none'}
  options: dict[str, dict[str, Any]] = {
    'unified': {'stage1': {'memory': None}},
    'gmlp': patches_only,
    'amlp': {**patches_only, 'stage1': {'attention': 64}},
    'mixer': {**patches_only, 'stage2': {'activation': 'gelu'}},
    # pooling needs tokens that are patches only. With identity, a class token would see no patch.
    'pooling': {'pool': 'mean'},
    'identity': {'pool': 'mean'},
  }
  return options.get(name, {})


def make_text_config(arguments: str, data: dict[str, Any], **overrides: dict[str, Any]) -> ConfigDict:
  """Return the config of a run on texts. The arguments and errors are those of `make_config`."""
  return _make_config(arguments, TEXT_RECIPES, 'characters', data, overrides)


def make_config(arguments: str, data: dict[str, Any], **overrides: dict[str, Any]) -> ConfigDict:
  """Return the config of a run on images.

  Args:
    arguments: 'model=…,recipe=…,size=…,task=…'. Each of the parts may be left out.
    data: values of keys in section `data`, for the data set.
    **overrides: values of keys, by section, such as train={'epochs': 80.0}. They replace the values of any recipe.

  Raises:
    UserError: an argument or value is unknown.
  """
  return _make_config(arguments, RECIPES, 'small', data, overrides)


def _make_config(
  arguments: str, recipes: Mapping[str, Callable], default: str, data: dict[str, Any], overrides: dict[str, Any]
) -> ConfigDict:
  given = {'model': 'hyperbf', 'recipe': default, 'size': '', 'task': ''}
  for part in filter(None, arguments.split(',')):
    key, _, value = part.partition('=')
    choose('config argument', key, {name: name for name in given})
    if not value:
      raise UserError(f'config argument {part!r} needs a value: {key}=VALUE')
    given[key] = value
  config = choose('recipe', given['recipe'], recipes)()
  config.recipe = given['recipe']
  config.model.name = given['model']
  config.data.update(data)
  for section, values in overrides.items():
    config[section].update(values)
  if given['task']:
    _set_task(config, given['task'])
  stages = config.stages
  del config.stages
  if given['size']:
    sizes = SIZES_OF.get(given['model'], SIZES)
    width, depth, heads, expansion = choose('size', given['size'], sizes)
    config.model.update(width=width, depth=depth, heads=heads, expansion=expansion)
  named = named_options(config.model.name)
  config.model.update({key: value for key, value in named.items() if key in config.model})
  # A unit of an MLP has 2D + 1 parameters, and so has a center with its σ. The models of a recipe thus have about the
  # same number of parameters.
  for stage, options in zip(('stage1', 'stage2'), stage_options(config.model.name, None), strict=True):
    for changes in (named.get(stage, {}), stages[stage], overrides.get('model', {}).get(stage, {})):
      options.update({key: value for key, value in changes.items() if key in options})
    config.model[stage] = {key: placeholder(int) if value is None else value for key, value in options.items()}
  return config.lock()


def _set_task(config: ConfigDict, task: str) -> None:
  """Change the task of a config to another task on the same kind of data.

  The config gets the keys that only the new task has. Keys that the new task does not use get values that turn them
  off.
  """
  alike = next(tasks for tasks in (IMAGE_TASKS, TEXT_TASKS) if config.task in tasks)
  config.task = choose('task', task, {name: name for name in alike})
  for values in (UNUSED.get(task, {}), {name: key.default for name, key in keys_of_task(task).items()}):
    for name, value in values.items():
      section, _, last = name.partition('.')
      config[section][last] = value
