"""Prints the README's tables from the runs and benchmarks in this folder: python results/table.py."""

import collections
import json
import pathlib
import statistics

ROOT = pathlib.Path(__file__).parent
HEADER = """\
| data | recipe | model | parameters | seeds | test accuracy, % | NLL | ECE, % | device |
|---|---|---|---|---|---|---|---|---|"""


def table() -> str:
  """A row for every data set, recipe and model: means over its seeds, and each seed's accuracy."""
  runs = collections.defaultdict(list)
  for path in sorted(ROOT.glob('*/result.json')):
    result = json.loads(path.read_text())
    runs[result['dataset'], result['recipe'], result['model'], result['epochs']].append(result)
  rows = [HEADER]
  for (dataset, recipe, model, epochs), results in runs.items():
    mean = {key: statistics.fmean(r[key] for r in results) for key in ('accuracy', 'nll', 'ece')}
    each = ', '.join(f'{r["accuracy"]:.2f}' for r in results)
    cells = (
      dataset,
      f'{recipe}, {epochs:g} epochs',
      model,
      f'{results[0]["params"]:,}',
      ', '.join(str(r['seed']) for r in results),
      f'**{mean["accuracy"]:.2f}** ({each})',
      f'{mean["nll"]:.3f}',
      f'{mean["ece"]:.1f}',
      results[0]['device'],
    )
    rows.append('| ' + ' | '.join(cells) + ' |')
  return '\n'.join(rows)


def benchmark(name: str, columns: tuple[str, ...]) -> str:
  """These columns of a benchmark's rows, and where they were measured."""
  measured = json.loads((ROOT / 'benchmarks' / f'{name}.json').read_text())
  rows = [columns, ('---',) * len(columns)]
  rows += [[_cell(row[column]) for column in columns] for row in measured['rows']]
  lines = ['| ' + ' | '.join(row) + ' |' for row in rows]
  return '\n'.join([f'{measured["title"]}; {measured["device"]}:', '', *lines])


def _cell(value: object) -> str:
  return f'{value:,.3g}' if isinstance(value, float) else f'{value:,}' if isinstance(value, int) else str(value)


BENCHMARKS = {
  'step': ('model', 'width', 'batch', 'parameters', 'images/s', 'time / vit', 'of matmul rate', 'temporary MB'),
  'authors': ('model', 'width', 'batch', 'images/s', 'ours/theirs'),
}

if __name__ == '__main__':
  print('\n\n'.join([table(), *(benchmark(name, columns) for name, columns in BENCHMARKS.items())]))
