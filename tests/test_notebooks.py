"""The notebooks of examples/ are complete: their code parses, and every cell ran without an error. They run in
`make test-docs`, and tests/test_readme.py follows their links.
"""

import ast
import json
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parents[1]
NOTEBOOKS = sorted(ROOT.glob('examples/*.ipynb'))


def test_there_are_notebooks_and_the_index_lists_them():
  index = (ROOT / 'docs' / 'README.md').read_text()
  site = (ROOT / 'mkdocs.yml').read_text()
  assert len(NOTEBOOKS) >= 4
  assert all(path.name in index and f'tutorials/{path.stem}.md' in site for path in NOTEBOOKS)


@pytest.mark.parametrize('path', NOTEBOOKS, ids=lambda path: path.stem)
def test_every_cell_parses_and_was_executed_in_order(path):
  code = [cell for cell in json.loads(path.read_text())['cells'] if cell['cell_type'] == 'code']
  for cell in code:
    ast.parse(''.join(cell['source']).removesuffix(';'))
  assert [cell['execution_count'] for cell in code] == list(range(1, len(code) + 1))
  outputs = [output for cell in code for output in cell['outputs']]
  assert outputs and all(output['output_type'] != 'error' for output in outputs)
  assert all(output.get('name') != 'stderr' for output in outputs), 'a warning is in the outputs: execute it again'
