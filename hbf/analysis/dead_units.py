"""Measurement of dead centers in stage 2, with settings of CBMM Memo 143's code and with this library's default.

python -m hbf.analysis.dead_units                  # trains five models of width 768 on the digits: minutes on a CPU
python -m hbf.analysis.dead_units --report         # draws the table and the picture again, from stored numbers

The models differ only in stage 2. docs/research/dead-units.md explains the results.
"""

import dataclasses
import functools
import pathlib
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from ml_collections import ConfigDict
from rich.console import Console

from hbf.analysis.report.dead_units_report import draw, table
from hbf.analysis.starts import initial_params
from hbf.analysis.study import Record, Study
from hbf.analysis.units import Units, observe
from hbf.config.datasets import digits
from hbf.data.augment.batches import normalize
from hbf.errors import UserError, in_one_line
from hbf.models.classifier import ImageClassifier
from hbf.ops.kernels import SIGNED
from hbf.training.convert import write
from hbf.training.experiment import Experiment, prepare
from hbf.training.loop import train
from hbf.training.restore import restore

WIDTH = 768  # as in the memo
SIZES = {'model.width': WIDTH, 'model.depth': 2, 'model.patch': 2}
TRAINING = {'train.epochs': 2.0, 'train.batch_size': 32, 'evaluate.every': '2epochs', 'checkpoint.every': '2epochs'}
IMAGES = 64  # test images for the measurement
ROUNDING = 1e-6  # a mean response below this fraction of the responses' spread is reported as 0


@dataclasses.dataclass(frozen=True)
class Setting:
  """A variant of stage 2.

  Attributes:
    name: title of the setting's row in the table.
    stage2: options of stage 2. They replace those of recipe `memo`.
    as_published: True to initialize like the authors' code: coefficients are drawn as in a PyTorch linear layer, and
      the log-gain is 0.
  """

  name: str
  stage2: dict[str, Any]
  as_published: bool = False


def settings() -> list[Setting]:
  """Return five settings: two from the authors' code, two with other values of sigma, and this library's default."""
  gained = {'normalization': 'none', 'centers_init': 'normal'}

  def memo(beta: float, centers: int) -> Setting:
    # β = 1/2σ², and at init σ² = sigma_scale · √D.
    options = gained | {'kernel': SIGNED, 'metric': 'bilinear', 'centers': centers}
    return Setting(f'β = {beta:g}, {centers:,} centers', options | {'sigma_scale': 0.5 / beta / WIDTH**0.5}, True)

  ours = {'sigma_scale': 0.5, 'normalization': 'layer', 'centers_init': 'tokens'}
  return [
    memo(0.1, 11),
    memo(0.001, 1500),
    Setting('σ² = D, gain', gained | {'sigma_scale': WIDTH**0.5}),
    Setting('σ² = √D, gain', gained | {'sigma_scale': 1.0}),
    Setting('σ² = √D/2, layer norm, from tokens', ours),
  ]


def measure(setting: Setting, data_dir: str) -> dict[str, Any]:
  """Train a model, and measure its centers at initialization and after training. Return a row of numbers."""
  with tempfile.TemporaryDirectory() as folder:
    workdir = pathlib.Path(folder) / 'run'
    experiment = prepare(_config(setting, data_dir))
    params = _start(experiment, setting)
    before = _observe(experiment, params)
    write(workdir, experiment, params)
    result = train(experiment.config, workdir, Console(stderr=True))
    if result is None:
      raise UserError('a signal stopped the training: run the command again')
    after = _observe(experiment, restore(workdir, 'latest').params)
  about = {'setting': setting.name, 'params': result['params'], 'accuracy': result['accuracy']}
  return about | {'init': _scores(before), 'trained': _scores(after)}


def _config(setting: Setting, data_dir: str) -> ConfigDict:
  config = digits('model=hyperbf,recipe=memo')
  changes = SIZES | TRAINING | {'data.dir': data_dir}
  config.update_from_flattened_dict(changes | {f'model.stage2.{key}': value for key, value in setting.stage2.items()})
  return config


def _start(experiment: Experiment, setting: Setting) -> Any:
  """Return the initial parameters of a setting."""
  params = initial_params(experiment)
  if setting.as_published:
    for i, key in enumerate(jax.random.split(jax.random.key(1), experiment.model.trunk.depth)):
      unit = params[f'block{i}']['stage2']
      bound = unit['coefficients'].shape[1] ** -0.5
      unit['coefficients'] = jax.random.uniform(key, unit['coefficients'].shape, minval=-bound, maxval=bound)
      unit['log_gain'] = jnp.zeros_like(unit['log_gain'])
  return params


def _observe(experiment: Experiment, params: Any) -> Units:
  source, data = experiment.splits['test'], experiment.config.data
  images, labels = zip(*(source[i] for i in range(IMAGES)), strict=True)
  assert isinstance(experiment.model, ImageClassifier)  # `_config` asks for images
  return observe(
    experiment.model, params, normalize(jnp.asarray(np.stack(images)), data.mean, data.std), jnp.asarray(labels)
  )


def _scores(units: Units) -> dict[str, Any]:
  mean = units.mean()
  mean = np.where(np.abs(mean) < ROUNDING * units.spread(), 0, mean)
  scores = {'mean': mean, 'spread': units.spread(), 'learning': units.learning()}
  scores |= {name: 100 * faulty.mean(axis=1) for name, faulty in units.health()._asdict().items()}
  return {name: values.tolist() for name, values in scores.items()}


def _measure_all(data_dir: str, record: Record) -> None:
  rows = [measure(setting, data_dir) for setting in settings()]
  record.save({'data': 'digits', 'seed': 0, 'config': SIZES | TRAINING, 'rows': rows})


@in_one_line
def main(arguments: Sequence[str] | None = None) -> int:
  """Run the command and return its exit status."""
  study = Study('dead-units', draw, table, verbosity=logging.ERROR)  # Orbax warns of intended behavior
  parser = study.parser('hbf.analysis.dead_units', __doc__)
  parser.add_argument(
    '--data_dir', default='~/tensorflow_datasets', help='TFDS folder; the digits are prepared there if missing'
  )
  flags = parser.parse_args(arguments)
  return study.run(flags, functools.partial(_measure_all, flags.data_dir))


if __name__ == '__main__':
  sys.exit(main())
