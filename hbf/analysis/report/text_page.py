"""The sections of the page that `hbf explain` writes for a language model.

The sections are about windows of the training text, `train` [n, T + 1], and of the test text, `test` [m, T + 1]. The
first T tokens of a window are the inputs. The token to predict for an input is the token after it.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from hbf.analysis import texts, token_order
from hbf.analysis.interventions import Mean
from hbf.analysis.relevance import probabilities
from hbf.analysis.report.page import PageTable, Paragraph, Section
from hbf.analysis.texts import Observed, TextRun
from hbf.analysis.unit_params import block_names, count_units, last_block, silence
from hbf.training.workdir import read_result

WINDOWS = 200  # windows of the training text for contexts
ROOM = 2**26  # most responses of a block in memory. Larger models get fewer windows
TESTED = 50  # windows of the test text for effects
CONTEXTS, SHOWN = 5, 12  # contexts shown for a center, and centers shown for a block
VOTED, VOTERS = 8, 3  # test tokens whose votes are shown, and voters shown for each token
TRIED, EFFECTS = 48, 10  # centers that are silenced one by one, and centers in the table of effects
TITLES = {
  'run': 'The run',
  'centers': 'Centers',
  'votes': 'Votes',
  'interventions': 'Interventions',
  'heads': 'Heads',
}


def explain_text(run: TextRun) -> tuple[int, Iterator[Section]]:
  """Return the number of sections of the page, and an iterator that computes the sections.

  Raises:
    UserError: the text of training or of test is shorter than one window.
  """
  units = max(_units(run), default=1)
  train = run.windows('train', max(8, min(WINDOWS, ROOM // (run.task.length * units))))
  return len(TITLES), _sections(run, train, run.windows('test', TESTED))


def _sections(run: TextRun, train: np.ndarray, test: np.ndarray) -> Iterator[Section]:
  yield _run(run)
  responses = run.responses(train)
  if not responses:
    said = 'Stage 2 of this model is not a HyperBF, so it has no centers.'
    for name in ('centers', 'votes', 'interventions'):
      yield Section(name, TITLES[name], [Paragraph(said)], {'lacks': said})
  else:
    places = {block: texts.top_places(found, CONTEXTS) for block, found in responses.items()}
    tested = run.observe(test)
    answers = tested.logits.argmax(axis=-1)
    cast = texts.votes(run, tested, answers)
    yield _centers(run, train, responses, places)
    yield _votes(run, train, places[last_block(run.model)], test, tested, cast)
    yield _interventions(run, test, texts.nll(tested.logits, test), cast)
  yield _heads(run)


def _units(run: TextRun) -> Iterator[int]:
  for block in block_names(run.model):
    if 'coefficients' in run.params[block].get('stage2', {}):
      yield count_units(run.params, block)


def _run(run: TextRun) -> Section:
  config, result = run.restored.config, read_result(run.workdir) or {}
  if run.average and result:
    result |= result['average']
  names = ('params', 'token_nll', 'accuracy', 'bits_per_byte', 'epochs', 'device', 'commit')
  rows = [('model', config.model.name), ('data set', config.data.name), ('seed', str(config.seed))]
  rows += [('window', f'{run.task.length} tokens'), ('tokenizer', run.task.description)]
  rows += [(name.replace('_', ' '), _format(result[name])) for name in names if name in result]
  caption = f'Checkpoint of step {run.restored.step}. Scores are of the test split, at the end of training.'
  numbers: dict[str, Any] = {'evaluated': 'average' if run.average else 'parameters', 'step': run.restored.step}
  numbers |= {key: result[key] for key in names if key in result}
  return Section('run', TITLES['run'], [PageTable(('', ''), rows, caption)], numbers, 'hbf eval')


def _format(value: Any) -> str:
  return f'{value:,.4g}' if isinstance(value, float) else f'{value:,}' if isinstance(value, int) else str(value)


def _centers(
  run: TextRun,
  train: np.ndarray,
  responses: dict[str, np.ndarray],
  places: dict[str, list[list[texts.Place]]],
) -> Section:
  """Return the section on the centers whose responses vary most.

  It shows the texts at which these centers respond most, and the tokens that their coefficients favor.

  Args:
    run: the run.
    train: windows of the training text.
    responses: by block, the responses of the centers to `train`, [n, T, U].
    places: for each block and center, the tokens of `train` with the greatest responses.
  """
  parts: list[Any] = [
    Paragraph(
      f'Contexts are from {len(train):,} windows of the training text. A bracket marks the token at which the center '
      'responds. ⏎ is a line break.'
    )
  ]
  numbers = {}
  for block, of_block in responses.items():
    writes, deviation = texts.written(run, block), of_block.std(axis=(0, 1))
    shown = np.argsort(-deviation, kind='stable')[:SHOWN]
    rows = [
      (
        str(center),
        '\n'.join(texts.context(run, train, place) for place in places[block][center]),
        _tokens(run, np.argsort(-writes[center])[:4]),
        _tokens(run, np.argsort(writes[center])[:4]),
      )
      for center in shown
    ]
    caption = (
      f'{block}: the {len(shown)} of {len(deviation):,} centers whose responses vary most, with the contexts of '
      'their greatest responses. Raises and lowers: the next tokens that the coefficients favor and disfavor most, '
      'if no block came after this one.'
    )
    parts.append(PageTable(('center', 'contexts', 'raises', 'lowers'), rows, caption))
    numbers[block] = {'centers': len(deviation), 'deviation': deviation.round(6).tolist()}
  return Section(
    'centers', TITLES['centers'], parts, numbers, 'hbf.analysis.texts.top_places(run.responses(windows)[block], 5)'
  )


def _tokens(run: TextRun, tokens: np.ndarray) -> str:
  return ' '.join(f'‘{run.shown([token])}’' for token in tokens)


def _votes(
  run: TextRun,
  train: np.ndarray,
  places: list[list[texts.Place]],
  test: np.ndarray,
  tested: Observed,
  cast: np.ndarray,
) -> Section:
  """Return the section on the centers of the last block with the strongest votes for answers in windows of `test`.

  Args:
    run: the run.
    train: windows of the training text.
    places: for each center of the last block, the tokens of `train` with the greatest responses.
    test: windows of the test text.
    tested: what the model computes from `test`.
    cast: the votes of the U centers for the likeliest next token, [m, T, U].
  """
  block, rows, numbers = last_block(run.model), [], []
  middle = run.task.length * 3 // 4
  for window in range(min(VOTED, len(test))):
    place = texts.Place(window, middle)
    p = probabilities(tested.logits[window, middle][None])[0]
    answer = int(p.argmax())
    for rank, center in enumerate(np.argsort(-cast[window, middle], kind='stable')[:VOTERS].tolist()):
      without = run.observe(test[[window]], silence(run.params, block, [center])).logits[0, middle]
      lost = _excess(tested.logits[window, middle], answer) - _excess(without, answer)
      said = f'{texts.context(run, test, place)} → ‘{run.shown([answer])}’ {p[answer]:.0%}'
      rows.append(
        (
          said if rank == 0 else '',
          str(center),
          f'{cast[window, middle, center]:+.2f}',
          f'{lost:+.2f}',
          '\n'.join(texts.context(run, train, near) for near in places[center][:2]),
        )
      )
      numbers.append({'window': window, 'answer': answer, 'center': center, 'lost': lost})
  caption = (
    f'The centers of {block} with the strongest votes for the answer, in windows of the test text. Vote: the '
    'contribution to the answer’s logit, relative to the mean logit of all tokens. Here the divisor of the last norm '
    'counts as a constant. Lost: the drop of the same logit if the network runs again without the center.'
  )
  header = ('text → answer', 'center', 'vote', 'lost', 'the center responds most to')
  return Section(
    'votes', TITLES['votes'], [PageTable(header, rows, caption)], {'votes': numbers}, 'hbf.analysis.texts.votes(…)'
  )


def _excess(logits: np.ndarray, answer: int) -> float:
  return float(logits[answer] - logits.mean())


def _interventions(run: TextRun, test: np.ndarray, losses: np.ndarray, cast: np.ndarray) -> Section:
  """Return the section on the change of the loss without single centers, and without many centers.

  Args:
    run: the run.
    test: windows of the test text.
    losses: the loss at each token of `test`, [m, T].
    cast: the votes of the U centers of the last block for the likeliest next token, [m, T, U].
  """
  block = last_block(run.model)
  which = np.argsort(-np.abs(cast).mean(axis=(0, 1)), kind='stable')[:TRIED].tolist()

  def without(units: Sequence[int]) -> Mean:
    return texts.loss_without(run, test, losses, block, units)

  effects = {unit: without([unit]) for unit in which}
  count = cast.shape[-1]
  half = np.random.default_rng(0).permutation(count)[: count // 2].tolist()
  controls = {'all centers silenced': without(range(count)), 'a random half silenced': without(half)}
  strongest = sorted(effects, key=lambda unit: -effects[unit].mean)[:EFFECTS]
  caption = (
    f'Change of the loss in nats per token on {len(test)} windows of the test text, if a center of {block} is '
    f'silenced: mean and half of the 95% interval over the windows. Among the {len(which)} centers with the '
    f'strongest votes, the {len(strongest)} with the greatest change are shown. The last rows are controls.'
  )
  rows = [(f'center {unit}', effects[unit].text(4)) for unit in strongest]
  rows += [(name, mean.text(4)) for name, mean in controls.items()]
  numbers = {
    'windows': len(test),
    'silenced': {str(unit): mean._asdict() for unit, mean in effects.items()},
    'controls': {name: mean._asdict() for name, mean in controls.items()},
  }
  command = "run.losses(windows, silence(run.params, 'block0', [3]))"
  return Section(
    'interventions', TITLES['interventions'], [PageTable(('silenced', 'loss'), rows, caption)], numbers, command
  )


def _heads(run: TextRun) -> Section:
  """Return the section on the mean distance over which each head attends."""
  far = token_order.distances(run.model, run.params, jnp.asarray(run.windows('test', token_order.WINDOWS)[:, :-1]))
  if not far:
    said = 'Stage 1 of this model is not softmax or HyperBF attention, so it has no attention weights.'
    return Section('heads', TITLES['heads'], [Paragraph(said)], {'lacks': said})
  rows = [(block, ', '.join(f'{z:.1f}' for z in heads)) for block, heads in far.items()]
  caption = 'Mean distance to the attended tokens, in tokens, for each head. Only the second half of a window counts.'
  numbers = {block: heads.tolist() for block, heads in far.items()}
  return Section('heads', TITLES['heads'], [PageTable(('block', 'distance of each head'), rows, caption)], numbers)
