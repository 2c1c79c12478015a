"""Write a page that explains a run: its centers and heads, reasons for its answers and, for images, its errors.

hbf explain --workdir=runs/c10 --ood=cifar100 --ood=photos --against=runs/vit
"""

from collections.abc import Sequence
from typing import Any

from absl import flags

from hbf import cli
from hbf.arguments import expand
from hbf.errors import UserError

WORKDIR = cli.define_path('workdir', 'Folder of the run; the page is written there.', required=True)
AGAINST = cli.define_path('against', 'Folder of another run, which is shown beside the first.')
SEED_RUN = flags.DEFINE_multi_string(
  'seed_run', [], 'A run of the same network with another seed, after `hbf explain` of that run. May be repeated.'
)
OOD = flags.DEFINE_multi_string(
  'ood', [], 'A data set, or a folder of images, with other classes than the run. The flag may be repeated.'
)
CHECKPOINT, AVERAGE = cli.define_checkpoint('Explain')
MOVED = cli.define_moved()


def main(argv: Sequence[str]) -> int:
  """Write explain.html and explain.json into the run folder."""
  del argv
  from rich.console import Console
  from rich.progress import Progress

  from hbf.training.machine import keep_compiled_programs, keep_freed_memory

  keep_freed_memory()
  keep_compiled_programs()
  from hbf.analysis.report.explain import about, explain, numbers
  from hbf.analysis.report.page import render
  from hbf.analysis.report.sections import seeds
  from hbf.analysis.report.text_page import explain_text
  from hbf.analysis.texts import TextRun
  from hbf.analysis.trained_run import TrainedRun
  from hbf.training.edits_file import warn_of_edits
  from hbf.training.learned import warn_of_learned
  from hbf.training.mirror import local_copy
  from hbf.training.workdir import load_config, replace_text, write_json

  def opened(kind: Any, folder: str) -> Any:
    return kind.of(local_copy(folder), CHECKPOINT.value, average=AVERAGE.value, **MOVED())

  against, folder = None, local_copy(WORKDIR.value)
  if SEED_RUN.value and AGAINST.value:
    raise UserError('--seed_run and --against make different pages: leave one of them out')
  others = seeds.read_seed_runs(folder, [*map(expand, SEED_RUN.value)], AVERAGE.value)
  warn_of_edits(folder, applied=False, instead='`hbf eval --edits` measures them')
  warn_of_learned(folder)
  if load_config(folder).task == 'next_token':
    if AGAINST.value or OOD.value:
      raise UserError('--against and --ood are for runs on images: leave them out for a run on texts')
    subject = opened(TextRun, WORKDIR.value)
    count, sections = explain_text(subject)
  else:
    subject, against = opened(TrainedRun, WORKDIR.value), opened(TrainedRun, AGAINST.value) if AGAINST.value else None
    count, sections = explain(subject, against, OOD.value)
  with Progress(console=Console(stderr=True), transient=True) as progress:
    made = list(progress.track(sections, total=count, description='explaining'))
  if others:
    made.append(seeds.section([seeds.SeedRun.of(folder, numbers(made)), *others]))
  title = ' beside '.join(about(run) for run in (subject, against) if run)
  workdir = subject.workdir
  write_json(workdir / 'explain.json', numbers(made))
  replace_text(workdir / 'explain.html', render(title, f'{workdir.name}, by hbf explain', made))
  print(f'{workdir / "explain.html"} explains {title}; its numbers are in explain.json')
  return 0


if __name__ == '__main__':
  cli.run(main)
