r"""Compare models with equal numbers of parameters: train each with every seed, and write one table.

hbf compare --preset=small --workdir=runs/small            # other presets: memo (the memo's Table 2), rivals, rates
hbf compare --config=cifar10:recipe=small --config.train.epochs=5.0 --seeds=0,1,2 \
  --arm=vit --arm=hyperbf --arm='large-sigma: hyperbf model.stage2.sigma_scale=2.0' --workdir=runs/sigmas
hbf compare --workdir=runs/small --report                  # the table again, from the logs
hbf compare --preset=laptop-tune --tune=12 --workdir=runs/tune   # twelve trials of each arm
hbf compare --preset=laptop-tune --tune=12 --sampler=tpe --prune --workdir=runs/tpe   # with Optuna
hbf compare --preset=laptop --tuned=runs/tune/tuning.json --workdir=runs/tuned   # with each arm's best options

Trials are selected on held-out images. Each run is an ordinary run folder of `hbf train`. The same command continues
where it was stopped or killed. A later command may add seeds and arms. A flag --config.KEY=VALUE applies to all arms.
"""

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from absl import flags

from hbf import cli
from hbf.errors import UserError, choose

if TYPE_CHECKING:
  from hbf.comparison.grid import Comparison

CONFIGS = flags.DEFINE_multi_string(
  'config', [], 'DATA[:recipe=…,size=…]. The flag may be repeated, to compare on several data sets.'
)
ARMS = flags.DEFINE_multi_string(
  'arm',
  [],
  "'MODEL' or 'LABEL: MODEL key=value …'. The flag may be repeated. The first arm is the reference. With --preset, a "
  'label of the preset is enough.',
)
SEEDS = flags.DEFINE_string('seeds', '', "Seeds such as 0,1,2. Default: the preset's seeds; without a preset 0,1,2.")
PRESET = flags.DEFINE_string(
  'preset',
  '',
  'A comparison of hbf.comparison.presets. Other flags replace its parts. Parameters are matched to its '
  'first arm, or to the arm that it names.',
)
WORKDIR = cli.define_path('workdir', 'Folder of the comparison.', required=True)
DEVICES = flags.DEFINE_string(
  'devices',
  '',
  'Devices with one run at a time on each: gpu:0,gpu:1, or cores such as cpu:0,cpu:1. A GPU that is given several '
  'times has several runs at a time. Default: each run uses all devices.',
)
MATCH = flags.DEFINE_boolean(
  'match', True, 'Give every arm as many parameters as the first, within 1%, by its number of centers or units.'
)
OPERATIONS = flags.DEFINE_string(
  'operations',
  '',
  "Training operations of each arm, which set its epochs: match (the first arm's), a number such as 1.8e14, or none "
  "(keep the epochs). Default: the preset's choice; without a preset none.",
)
TUNE = flags.DEFINE_integer(
  'tune', 0, 'Number of trials of each arm, with options drawn from the space, instead of a comparison.'
)
SAMPLER = flags.DEFINE_enum(
  'sampler',
  'random',
  ['random', 'tpe'],
  "With --tune: random draws, or Optuna's TPE, which proposes options from the results of earlier trials.",
)
PRUNE = flags.DEFINE_boolean(
  'prune', False, "With --tune: stop a trial that is worse than the median of the arm's finished trials, by Optuna."
)
SPACE = flags.DEFINE_multi_string(
  'space',
  [],
  "With --tune: 'KEY=LOW..HIGH', 'KEY=A|B', or 'LABEL: KEY=…' for one arm. These are added to the preset's space.",
)
TUNED = cli.define_path('tuned', "The tuning.json of a search: each arm gets its best trial's options.")
REPORT = flags.DEFINE_boolean('report', False, 'Only write the table and the curves again, from the logs.')
SPLIT = flags.DEFINE_enum(
  'split', 'test', ['test', 'validation'], 'With --report: validation prints the scores of held-out images instead.'
)
OVERRIDES = cli.take_overrides()


def main(argv: Sequence[str]) -> int:
  """Train the missing runs and write the report. With --report, only write it.

  Return 1 if a run failed, else 0, also after a signal.
  """
  del argv
  if not REPORT.value:  # the flags of a search may stay, so that --report can be added to any command
    cli.refuse_idle((SPACE, TUNE), (SAMPLER, TUNE), (PRUNE, TUNE), (SPLIT, REPORT))
  import jax

  from hbf.comparison import tune
  from hbf.comparison.compare import compare, report
  from hbf.comparison.devices import parse_devices
  from hbf.comparison.proposals import Method

  jax.config.update('jax_platforms', 'cpu')  # the runs need the accelerators
  workdir = pathlib.Path(WORKDIR.value)
  if REPORT.value:
    if (workdir / tune.TUNING).exists():
      if SPLIT.present:
        raise UserError(
          f'{workdir} is a search, whose trials have no other scores than held-out ones: leave out --split'
        )
      tune.report(workdir)
    else:
      report(workdir, SPLIT.value)
    return 0
  devices = parse_devices(DEVICES.value)
  if TUNE.present:
    if TUNED.value:
      raise UserError('--tune searches options, and --tuned takes those that a search found: leave one of them out')
    if SEEDS.value:
      raise UserError(f'--tune gives each trial a seed of its own, from {tune.FIRST_SEED} on: leave out --seeds')
    method = Method(SAMPLER.value, PRUNE.value)
    return 0 if tune.tune(comparison_of_flags(), TUNE.value, workdir, devices, method) else 1
  return 0 if compare(comparison_of_flags(), workdir, devices) else 1


def comparison_of_flags() -> 'Comparison':
  """Return the comparison that the flags describe.

  Raises:
    UserError: the preset is unknown, or --seeds is not a list of seeds.
  """
  from hbf.comparison import tune
  from hbf.comparison.grid import Comparison, parse_seeds, published_for, with_arms
  from hbf.comparison.presets import PRESETS

  preset = choose('preset', PRESET.value, PRESETS) if PRESET.value else Comparison()
  comparison = dataclasses.replace(
    with_arms(preset, ARMS.value),
    configs=tuple(CONFIGS.value) or preset.configs,
    seeds=parse_seeds(SEEDS.value) or preset.seeds,
    overrides=(*preset.overrides, *OVERRIDES),
    match=MATCH.value,
    operations='' if OPERATIONS.value == 'none' else OPERATIONS.value or preset.operations,
  )
  if preset.space and not TUNE.present:
    raise UserError(f'preset {PRESET.value} is a search: add its number of trials, such as --tune=12')
  if TUNED.value:
    comparison = tune.with_best(comparison, pathlib.Path(TUNED.value))
  published = published_for(preset, comparison)  # not for arms with the options of a search
  return dataclasses.replace(comparison, published=published, space=(*comparison.space, *SPACE.value))


if __name__ == '__main__':
  cli.run(main)
