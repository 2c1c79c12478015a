"""Train a network on images or texts, or continue a run that was interrupted.

hbf train                                                                   # handwritten digits, HyperBF
hbf train --config=cifar10:model=vit,recipe=memo --workdir=runs/c10 --config.train.epochs=5
"""

import pathlib
import sys
from collections.abc import Sequence

from absl import flags

from hbf import cli

CONFIG = cli.define_config('digits')
PROCESSES = cli.define_processes()
WORKDIR = cli.define_path(
  'workdir', 'Folder of the run, or s3:// or gs://; default runs/<data>-<model>-<recipe>-<seed>.'
)

DETERMINISTIC = flags.DEFINE_boolean(
  'deterministic', False, 'Compute the same bits in every run on a GPU, more slowly. A CPU always does.'
)
ELASTIC = flags.DEFINE_boolean(
  'elastic', False, 'If processes of the run are lost, go on with the others from the last checkpoint.'
)


def main(argv: Sequence[str]) -> int:
  """Train. Return the exit status, which is 0 also after a signal. The same command then continues the run."""
  del argv
  from rich.console import Console

  from hbf.errors import UserError
  from hbf.training import elastic, processes
  from hbf.training.bucket import is_bucket
  from hbf.training.machine import compute_deterministically, keep_compiled_programs, keep_freed_memory
  from hbf.training.workdir import default_workdir

  address = WORKDIR.value or default_workdir(CONFIG.value)
  if ELASTIC.value:
    if is_bucket(address):
      raise UserError(f'--elastic is for several processes, and {address} is for one: choose a folder that all share')
    return elastic.supervise(pathlib.Path(address), **PROCESSES())
  elastic.end_with_supervisor()
  if DETERMINISTIC.value:
    compute_deterministically()
  processes.start(**PROCESSES())
  keep_freed_memory()
  keep_compiled_programs()
  from hbf.evaluation.tables import print_result, say
  from hbf.tasks.registry import TASKS
  from hbf.training.loop import train
  from hbf.training.mirror import mirrored

  console = Console(stderr=True)
  with mirrored(address, console) as workdir, processes.ended_by_loss():
    result = train(CONFIG.value, workdir, console)
  if result is not None and processes.is_first():
    console = Console(file=sys.stdout)
    print_result(result, str(workdir / 'result.json'), console)
    if 'average' in result:
      print_result(result['average'], 'average of the parameters', console)
    if command := TASKS[CONFIG.value.task].demo_command:
      say(console, f'See it at work: {command} --workdir={WORKDIR.value or workdir}')
  return 0


if __name__ == '__main__':
  cli.run(main)
