"""Evaluate a checkpoint of a run.

hbf eval --workdir=runs/c10 --checkpoint=latest --split=test
"""

import json
import pathlib
import sys
from collections.abc import Sequence

from absl import flags

from hbf import cli

PROCESSES = cli.define_processes()
WORKDIR = cli.define_workdir()
CHECKPOINT, AVERAGE = cli.define_checkpoint('Evaluate')
SPLIT = flags.DEFINE_string('split', 'test', 'train, validation (held out of train) or test.')
EDITS = flags.DEFINE_boolean('edits', False, "Apply the run's edits (hbf edit).")
COPIES = flags.DEFINE_string(
  'copies', '', 'none, mirror or mirror_shift: also report scores of outputs averaged over copies of each image.'
)
JSON = flags.DEFINE_boolean('json', False, 'Print one JSON object on stdout, everything else on stderr.')
OUTPUT = cli.define_path('output', 'Folder of eval-<split>-<step>.json; default: that of the run.', local=True)
MOVED = cli.define_moved()


def main(argv: Sequence[str]) -> int:
  """Evaluate, print the scores, and then write them. So they are printed even if the folder can't be written."""
  del argv
  from rich.console import Console

  from hbf.training import processes
  from hbf.training.machine import keep_compiled_programs, keep_freed_memory

  processes.start(**PROCESSES())
  keep_freed_memory()
  keep_compiled_programs()
  from hbf.evaluation.tables import print_classes, print_parts, print_result
  from hbf.training.edits_file import warn_of_edits
  from hbf.training.evaluate import evaluate_workdir
  from hbf.training.learned import warn_of_learned
  from hbf.training.mirror import local_copy

  workdir = local_copy(WORKDIR.value)
  evaluation = evaluate_workdir(
    workdir,
    CHECKPOINT.value,
    SPLIT.value,
    average=AVERAGE.value,
    copies=COPIES.value,
    edits=EDITS.value,
    **MOVED(),
  )
  if not processes.is_first():
    return 0
  warn_of_edits(workdir, EDITS.value)
  warn_of_learned(workdir)
  if JSON.value:
    print(json.dumps(evaluation.result))
  else:
    console = Console(file=sys.stdout)
    title = f'{WORKDIR.value}, {SPLIT.value}{", average" if AVERAGE.value else ""}{", edited" if EDITS.value else ""}'
    print_result(evaluation.result, title, console)
    if 'copies' in evaluation.result:
      print_result(evaluation.result['copies'], f'{title}, averaged over copies of each image', console)
    if 'confusion' in evaluation.result:
      print_classes(evaluation.result, evaluation.task.dataset.class_names, console)
    for part in ('label', 'target'):
      if f'per_{part}' in evaluation.result:
        print_parts(evaluation.result[f'per_{part}'], part, console)
  if sys.stdout:
    sys.stdout.flush()
  evaluation.save(pathlib.Path(OUTPUT.value) if OUTPUT.value else workdir)
  return 0


if __name__ == '__main__':
  cli.run(main)
