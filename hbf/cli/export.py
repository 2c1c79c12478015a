"""Write a run's classifier to a folder for use elsewhere: with this package, or with JAX alone.

hbf export --workdir=runs/flowers --output=flowers-model
"""

import pathlib
from collections.abc import Sequence

from absl import flags

from hbf import cli

WORKDIR = cli.define_workdir()
OUTPUT = cli.define_path('output', 'Folder to write: a new one, or an empty one.', required=True, local=True)
CHECKPOINT, AVERAGE = cli.define_checkpoint('Export')

EDITS = flags.DEFINE_boolean('edits', False, "Apply the run's edits (hbf edit).")


def main(argv: Sequence[str]) -> int:
  """Export the classifier."""
  del argv
  from hbf.training import export
  from hbf.training.edits_file import warn_of_edits
  from hbf.training.learned import warn_of_learned
  from hbf.training.machine import keep_freed_memory
  from hbf.training.mirror import local_copy

  keep_freed_memory()
  folder = pathlib.Path(OUTPUT.value)
  export.check_free(folder)
  workdir = local_copy(WORKDIR.value)
  model = export.from_run(workdir, CHECKPOINT.value, AVERAGE.value, EDITS.value)
  warn_of_edits(workdir, EDITS.value)
  warn_of_learned(workdir)
  export.export(model, folder)
  print(f'exported step {model.about["step"]} to {folder}')
  return 0


if __name__ == '__main__':
  cli.run(main)
