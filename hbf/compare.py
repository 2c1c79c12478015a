"""Compares models: every arm with every seed, parameters matched, one table.

python compare.py --preset=small --workdir=runs/small            # or memo: the memo's Table 2; or rivals
python compare.py --config=configs/cifar10.py:recipe=small --config.train.epochs=5.0 --seeds=0,1,2 \\
  --arm=vit --arm=hyperbf --arm='wide: hyperbf model.stage2.width_scale=2.0' --workdir=runs/widths
python compare.py --workdir=runs/small --report                  # the table again, from the logs

Each run is an ordinary workdir of train.py. The same command goes on where it was stopped or killed. Keys given as
--config.KEY=VALUE hold for all arms.
"""

import pathlib
import sys
from collections.abc import Sequence

import jax
from absl import flags
from rich.console import Console

from configs.comparisons import PRESETS, Comparison
from hbf import cli
from hbf.comparison.grid import Grid, check_runs, make_grid, parse_seeds
from hbf.comparison.report import write_report
from hbf.comparison.runs import parse_devices, run_all
from hbf.errors import choose
from hbf.training.workdir import held

CONFIGS = flags.DEFINE_multi_string(
  'config', [], 'FILE[:recipe=…,size=…]; give several to compare on several data sets.'
)
ARMS = flags.DEFINE_multi_string(
  'arm', [], "'MODEL' or 'LABEL: MODEL key=value …'; the first is what others differ from."
)
SEEDS = flags.DEFINE_string('seeds', '', 'Such as 0,1,2 (the default).')
PRESET = flags.DEFINE_string(
  'preset', '', 'A comparison of configs/comparisons.py; the other flags replace its parts.'
)
WORKDIR = flags.DEFINE_string('workdir', None, 'Folder of the comparison.', required=True)
DEVICES = flags.DEFINE_string(
  'devices', '', 'One run at a time on each: gpu:0,gpu:1 or cores, cpu:0,cpu:1. Default: all for one.'
)
MATCH = flags.DEFINE_boolean(
  'match', True, "Give every arm the first's parameters, within 1%, by its centres or hidden units."
)
REPORT = flags.DEFINE_boolean('report', False, 'Only write the table and the curves again, from the logs.')
OVERRIDES = cli.take_overrides()


def main(argv: Sequence[str]) -> int:
  """Runs what is missing and reports; exit status 1 if a run failed, 0 also if a signal stopped it."""
  del argv
  jax.config.update('jax_platforms', 'cpu')  # the accelerators are the runs'
  workdir = pathlib.Path(WORKDIR.value).expanduser()
  if REPORT.value:
    write_report(Grid.load(workdir), workdir, Console(file=sys.stdout))
    return 0
  grid, devices = asked_grid(), parse_devices(DEVICES.value)
  check_runs(grid, workdir)
  with held(workdir):
    grid.save(workdir)
    done = run_all(grid, workdir, devices, Console(stderr=True))
    complete = write_report(grid, workdir, Console(file=sys.stdout))
  return 1 if done and not complete else 0


def asked_grid() -> Grid:
  """The grid of the flags.

  Raises:
    UserError: something in them is wrong.
  """
  preset = choose('preset', PRESET.value, PRESETS) if PRESET.value else Comparison((), (), (0, 1, 2))
  return make_grid(
    CONFIGS.value or preset.configs,
    ARMS.value or preset.arms,
    [*preset.overrides, *OVERRIDES],
    parse_seeds(SEEDS.value) or preset.seeds,
    MATCH.value,
    preset.published,
  )


if __name__ == '__main__':
  cli.run(main)
