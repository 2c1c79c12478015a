"""Classify images over HTTP with the model of a run or an exported model.

hbf serve --workdir=runs/flowers --port=8000
"""

import importlib.util
import pathlib
from collections.abc import Sequence
from typing import Any

from absl import flags

from hbf import cli
from hbf.errors import UserError

WORKDIR = cli.define_workdir(required=False)
MODEL = cli.define_path('model', 'Folder of an exported model, instead of a run.')
HOST = flags.DEFINE_string('host', '127.0.0.1', 'Address to listen on. 0.0.0.0: all networks of this machine.')
PORT = flags.DEFINE_integer('port', 8000, 'Port to listen on. 0: any free port.', lower_bound=0, upper_bound=65535)
BATCH = flags.DEFINE_integer('batch', 32, 'The largest number of images in a batch.', lower_bound=1)
DEADLINE = flags.DEFINE_float(
  'deadline', 5.0, 'The longest time that an image waits for others, in ms.', lower_bound=0.0, upper_bound=6e4
)
QUEUE = flags.DEFINE_integer(
  'queue', 128, 'The largest number of images that the server holds at a time. It refuses more.', lower_bound=1
)
LIMIT_BYTES = flags.DEFINE_integer('limit_bytes', 10_000_000, 'The largest image file, in bytes.', lower_bound=1)
TIMEOUT = flags.DEFINE_float(
  'timeout',
  10.0,
  'The longest time to send an image, and to answer it, in seconds.',
  lower_bound=0.001,
  upper_bound=3600.0,
)
CHECKPOINT, AVERAGE = cli.define_checkpoint('Use')
EDITS = flags.DEFINE_boolean('edits', False, "Apply the run's edits (hbf edit).")
PATCHES = flags.DEFINE_boolean(
  'patches', False, 'Show the training patches nearest to the centers that vote for an answer.'
)
MOVED = cli.define_moved('For --patches: ')


def main(argv: Sequence[str]) -> int:
  """Load the model, listen and answer until a signal."""
  del argv
  cli.check_source(WORKDIR, MODEL, CHECKPOINT, AVERAGE, EDITS, PATCHES)
  cli.refuse_idle((MOVED.folder, PATCHES), (MOVED.root, PATCHES))
  if DEADLINE.value >= 1000 * TIMEOUT.value:
    raise UserError(
      f'--deadline={DEADLINE.value:g} ms is not below --timeout={TIMEOUT.value:g} s, so an image could wait for '
      'others until it is refused: give a shorter --deadline or a longer --timeout'
    )
  if PATCHES.value and EDITS.value:
    raise UserError('--patches explains the network without edits: leave out --edits or --patches')
  for package in ('starlette', 'uvicorn'):
    if importlib.util.find_spec(package) is None:
      raise UserError(f"hbf serve needs the package {package}: install it by pip install 'hbf[serve]'")
  from hbf.serving import application, server
  from hbf.serving.batcher import Batcher
  from hbf.training.machine import keep_compiled_programs
  from hbf.training.mirror import local_copy

  keep_compiled_programs()
  bound = server.listen(HOST.value, PORT.value)
  workdir = local_copy(WORKDIR.value) if WORKDIR.value else None
  classifier, about = _classifier(workdir)
  batcher = Batcher(classifier.logits, classifier.image_shape, BATCH.value, DEADLINE.value / 1000, QUEUE.value)
  batcher.compile()
  limits = application.Limits(LIMIT_BYTES.value, TIMEOUT.value)
  explain = _explain(workdir, about['step']) if workdir and PATCHES.value else None
  service = application.Service(classifier, about, batcher, limits, explain)
  server.run(service.application(), bound, TIMEOUT.value)
  return 0


def _classifier(workdir: pathlib.Path | None) -> tuple[Any, dict[str, Any]]:
  """Return the classifier, and the facts that the server shows: data set, step and number of classes.

  The argument is the local folder of the run. None stands for the exported model of --model.
  """
  from hbf.training import export, predict
  from hbf.training.edits_file import warn_of_edits
  from hbf.training.learned import warn_of_learned

  if workdir is None:
    folder = pathlib.Path(MODEL.value)
    classifier, about = predict.of_export(folder), export.read_about(folder)
  else:
    model = export.from_run(workdir, CHECKPOINT.value, AVERAGE.value, EDITS.value)
    warn_of_edits(workdir, EDITS.value)
    warn_of_learned(workdir)
    classifier, about = predict.of_trained(model), dict(model.about)
  if not classifier.form.ranked:
    raise UserError(
      f'the model has task {about["task"]}, and hbf serve answers classes: use hbf predict, or give a classifier'
    )
  return classifier, {'dataset': about['dataset'], 'step': about['step'], 'classes': len(about['classes'])}


def _explain(workdir: pathlib.Path, step: int) -> Any:
  """Return a function that explains an answer by training patches; see `hbf.serving.patches.nearest_patches`.

  A run that goes on may have a newer checkpoint by now. The answers are those of the checkpoint of `step`.
  """
  from hbf.serving.patches import nearest_patches

  return nearest_patches(workdir, str(step), AVERAGE.value, **MOVED())


if __name__ == '__main__':
  cli.run(main)
