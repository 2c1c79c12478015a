"""Methods that teach a fact to a language model, for a comparison, and the trials of each method.

A trial is one choice of a method's options. Most methods are those of `hbf.analysis.edit_methods`. The point of a
context is the vector of its last token in one of the two layers `hbf.editing.places.LAYERS`. A lookup has no such
points: its edits act on contexts whose tokens are those of an edited context.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from hbf.analysis.edit_methods import METHODS, Base, Method, Respond
from hbf.analysis.text_facts import CONTEXT
from hbf.editing.places import LAYERS
from hbf.models.edited import LAST, Observed


class TextTrial(NamedTuple):
  """One choice of a method's options.

  Attributes:
    layer: name of the layer that gives the points.
    reach: size of the region in which an edit acts (`hbf.analysis.edit_methods.Trial`).
    margin: the wanted lead of the right answer's logit after the edit.
  """

  layer: str
  reach: float
  margin: float


@dataclasses.dataclass(frozen=True)
class TextMethod:
  """A method, and the choices of its options that are tried.

  Attributes:
    method: the method.
    trials: the choices of options: one for a lookup of contexts, eight for every other method.
    names: True if prompts with invented names are guarded examples, in addition to the training text. They are not
      the prompts by which the methods are scored.
  """

  method: Method
  trials: tuple[TextTrial, ...]
  names: bool = False


def _on_layers(name: str, reaches: Sequence[float], margins: Sequence[float], names: bool = False) -> TextMethod:
  trials = tuple(TextTrial(layer, reach, margin) for layer in LAYERS for reach in reaches for margin in margins)
  return TextMethod(METHODS[name], trials, names)


def _lookup(of_prompt: bool) -> Respond:
  """Return the function `Method.respond` of a lookup. The response of an edit to a context is 1 or 0.

  Args:
    of_prompt: True for responses of 1 to all contexts that end with the edited context. False for a response of 1
      only to the edited context itself.
  """

  def respond(base: Base, edited: Observed, labels: np.ndarray, others: Observed, reach: float) -> np.ndarray:
    del base, labels, reach
    rows = []
    for own in edited.points:
      known = (own >= 0).sum() if of_prompt else len(own)
      rows.append((others.points[:, :known] == own[:known]).all(axis=1))
    return np.array(rows, np.float64)

  return respond


_CONTEXT = (TextTrial(CONTEXT, 0.0, 0.0),)
_MARGINS = (4.0, 16.0)
_REPLACED = (0.0,)
TEXT_METHODS = {
  'HyperBF ball, metric of copies': _on_layers('HyperBF ball, metric of copies', (1.0, 1.4), _MARGINS),
  'HyperBF ball, identity metric': _on_layers('HyperBF ball, identity metric', (1.0, 1.4), _MARGINS),
  'HyperBF ball, metric of copies, names guarded': _on_layers(
    'HyperBF ball, metric of copies', (1.0, 1.4), _MARGINS, names=True
  ),
  'ReLU neuron': _on_layers('ReLU neuron', (1.0, 2.0), _MARGINS),
  'ReLU neuron on points of norm 1': _on_layers('ReLU neuron on points of norm 1', (1.0, 1.96), _MARGINS),
  'GRACE, identity metric': _on_layers('GRACE, identity metric', (0.3, 0.5, 0.7, 1.0), _REPLACED),
  'GRACE, metric of copies': _on_layers('GRACE, metric of copies', (0.3, 0.5, 0.7, 1.0), _REPLACED),
  'least-squares update of the head': TextMethod(
    # The update of least change that gives all edited places their logits (ROME's eq. 2 for several keys).
    dataclasses.replace(METHODS['rank-one update of the head'], interpolates=True),
    tuple(TextTrial(LAST, ridge, margin) for ridge in (1e-4, 1e-3, 1e-2, 1e-1) for margin in (1.0, 4.0)),
  ),
  'lookup of the whole context': TextMethod(Method(_lookup(of_prompt=False), (), replaces=True), _CONTEXT),
  'lookup of the prompt': TextMethod(Method(_lookup(of_prompt=True), (), replaces=True), _CONTEXT),
}
