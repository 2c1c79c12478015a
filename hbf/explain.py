"""Makes a page that explains a run on images: its errors, kernels, centres, heads, and what decides its answers.

python -m hbf.explain --workdir=runs/c10
"""

import pathlib
from collections.abc import Sequence

from absl import flags
from rich.console import Console
from rich.progress import Progress

from hbf import cli
from hbf.training.machine import keep_compiled_programs, keep_freed_memory

WORKDIR = flags.DEFINE_string('workdir', None, 'Folder of the run.', required=True)
CHECKPOINT = flags.DEFINE_string('checkpoint', 'latest', 'latest, best (on the held-out part of train) or a step.')
DATA_DIR = flags.DEFINE_string('data_dir', '', 'Where prepared TFDS data lie, if not where they were in training.')
DATA_ROOT = flags.DEFINE_string('data_root', '', 'The image folder, if not where it was in training.')


def main(argv: Sequence[str]) -> int:
  """Writes explain.html and explain.json into the workdir."""
  del argv
  keep_freed_memory()
  keep_compiled_programs()
  from hbf.analysis.explain import TITLES, numbers, sections
  from hbf.analysis.page import render
  from hbf.analysis.subject import Subject
  from hbf.training.workdir import replace_text, write_json

  workdir = pathlib.Path(WORKDIR.value).expanduser()
  subject = Subject.of(workdir, CHECKPOINT.value, dir=DATA_DIR.value, root=DATA_ROOT.value)
  with Progress(console=Console(stderr=True), transient=True) as progress:
    made = list(progress.track(sections(subject), total=len(TITLES), description='explaining'))
  config = subject.restored.config
  about = f'{config.model.name} on {config.data.name}, recipe {config.recipe}, seed {config.seed}'
  write_json(workdir / 'explain.json', numbers(made))
  replace_text(workdir / 'explain.html', render(about, f'{workdir.name}, explained by python -m hbf.explain', made))
  print(f'{workdir / "explain.html"} explains {about}; its numbers are in explain.json')
  return 0


if __name__ == '__main__':
  cli.run(main)
