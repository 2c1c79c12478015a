"""Execute the notebooks of examples/ in fresh kernels: `make test-docs`. `--write` keeps the new outputs.

python -m tests.notebooks [--write] [NAME …]
"""

import pathlib
import sys
import time

import nbformat
from nbclient import NotebookClient

ROOT = pathlib.Path(__file__).parents[1]


def execute(path, write):
  """Execute a notebook. An error in a cell is raised. Return the seconds that it took."""
  notebook, start = nbformat.read(path, 4), time.monotonic()
  NotebookClient(notebook, timeout=600, resources={'metadata': {'path': str(ROOT)}}).execute()
  if write:
    for cell in notebook.cells:
      cell.metadata.pop('execution', None)  # times of the cells, which always differ
    notebook.metadata.language_info = {'name': 'python'}
    nbformat.write(notebook, path)
  return time.monotonic() - start


def main(arguments):
  """Execute the named notebooks, or all if none is named."""
  names = [argument for argument in arguments if argument != '--write']
  for path in sorted((ROOT / 'examples').glob('*.ipynb')):
    if not names or path.stem in names:
      print(f'{path.name}: {execute(path, "--write" in arguments):.0f} s', flush=True)


if __name__ == '__main__':
  main(sys.argv[1:])
