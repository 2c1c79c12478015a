"""Predict classes, labels or values of your own images, with the model of a run or an exported model.

hbf predict --workdir=runs/flowers holiday.jpg garden/
"""

import json
import pathlib
import sys
from collections.abc import Sequence

from absl import flags

from hbf import cli
from hbf.errors import UserError

WORKDIR = cli.define_workdir(required=False)
MODEL = cli.define_path('model', 'Folder of an exported model, instead of a run.')
EXPORT = cli.define_path('export', "Folder to which the run's model is exported, for use elsewhere.", local=True)
TOP = flags.DEFINE_integer(
  'top', 3, 'The largest number of classes to name for an image. Labels and values are all named.', lower_bound=1
)
CHECKPOINT, AVERAGE = cli.define_checkpoint('Use')
EDITS = flags.DEFINE_boolean('edits', False, "Apply the run's edits (hbf edit).")
LEARNED = flags.DEFINE_boolean(
  'learned', True, "Also answer with the run's learned classes (hbf learn), if it has any."
)
PAGE = cli.define_path(
  'page', 'File for a page with the reasons for each answer, and similar training patches.', local=True
)
MOVED = cli.define_moved('For --page: ')
JSON = flags.DEFINE_boolean(
  'json', False, 'Print a JSON list of {image, classes} (or labels, or values) or {image, error}, nothing else.'
)


def main(argv: Sequence[str]) -> int:
  """Print the answers to the images. With --export, also export the model.

  Return 1 if an image can't be read, else 0.
  """
  cli.check_source(WORKDIR, MODEL, EXPORT, PAGE, CHECKPOINT, AVERAGE, EDITS)
  cli.refuse_idle((MOVED.folder, PAGE), (MOVED.root, PAGE))
  if PAGE.value and EDITS.value:
    raise UserError('--page explains the network without edits: leave out --edits or --page')
  if not argv[1:] and not EXPORT.value:
    raise UserError('no images given: name files or folders after the flags')
  from hbf.training import export, predict
  from hbf.training.edits_file import warn_of_edits
  from hbf.training.learned import refuse_learned
  from hbf.training.machine import keep_compiled_programs, keep_freed_memory
  from hbf.training.mirror import local_copy
  from hbf.training.restore import check_classifies

  keep_freed_memory()
  keep_compiled_programs()
  images = predict.find_images(argv[1:])
  if PAGE.value:
    from hbf.analysis.report.sections.predictions import check_count

    check_count(len(images))  # before all images are answered
  if MODEL.value:
    classifier = predict.of_export(pathlib.Path(MODEL.value))
  else:
    folder = pathlib.Path(EXPORT.value)
    if EXPORT.value:
      export.check_free(folder)
    workdir = local_copy(WORKDIR.value)
    if PAGE.value:
      check_classifies(workdir, '--page')
    for name, given in (('--export', EXPORT.value), ('--page', PAGE.value), ('--edits', EDITS.value)):
      if given and LEARNED.value:
        refuse_learned(workdir, name)
    model = export.from_run(workdir, CHECKPOINT.value, AVERAGE.value, EDITS.value)
    warn_of_edits(workdir, EDITS.value)
    if EXPORT.value:
      export.export(model, folder)
      print(f'exported step {model.about["step"]} to {folder}', file=sys.stderr)
    classifier = predict.of_trained(model, predict.learned_in(workdir, model) if LEARNED.value else None)
  answers = [*predict.answer(classifier, images, TOP.value)]
  wrong = [answer for answer in answers if answer.error]
  for answer in wrong:
    print('error:', answer.error, file=sys.stderr)
  if JSON.value:
    print(json.dumps([answer.to_json() for answer in answers]))
  elif len(wrong) < len(answers):
    print(predict.to_table([answer for answer in answers if not answer.error]))
  if PAGE.value:
    from hbf.analysis.report.prediction_page import write_page

    read = [answer.image for answer in answers if not answer.error]
    write_page(workdir, str(model.about['step']), AVERAGE.value, read, PAGE.value, **MOVED())
  return 1 if wrong else 0


if __name__ == '__main__':
  cli.run(main, arguments=True)
