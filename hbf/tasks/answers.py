"""The form of a network's answer for an image.

An answer is a list of names with numbers: of classes or labels with their probabilities, or of quantities with their
predicted values.
"""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
from scipy import special

Named = tuple[tuple[str, float], ...]  # names with their numbers


@dataclasses.dataclass(frozen=True)
class AnswerForm:
  """The form of the answers of a task.

  Attributes:
    numbers: a function from a network's outputs to the numbers of an answer, both float64 [..., K], such as softmax.
    ranked: True if an answer lists the names with the largest numbers. False if it lists all names in their order.
    many: the key of the whole list in JSON, such as 'classes'.
    one: the key of a name in JSON, such as 'class'.
    number: the key of a number in JSON, such as 'probability'.
    form: the format of a number in tables.
  """

  numbers: Callable[[np.ndarray], np.ndarray]
  ranked: bool
  many: str
  one: str
  number: str
  form: str

  def answer(self, names: Sequence[str], outputs: np.ndarray, top: int) -> Named:
    """Return the answer for one image: a list of names with numbers. A ranked answer has at most `top` of them.

    The argument `outputs` has the network's outputs for the image, float64 [K], one for each of the K names.
    """
    numbers = self.numbers(outputs)
    order = np.argsort(-outputs, kind='stable')[:top] if self.ranked else np.arange(len(outputs))
    return tuple((names[number], float(numbers[number])) for number in order)

  def to_json(self, answer: Named) -> dict[str, list[dict[str, str | float]]]:
    """Return an answer as values for JSON, such as {'classes': [{'class': …, 'probability': …}, …]}."""
    return {self.many: [{self.one: name, self.number: number} for name, number in answer]}


def _softmax(outputs: np.ndarray) -> np.ndarray:
  return np.asarray(special.softmax(outputs, axis=-1))


def _sigmoid(outputs: np.ndarray) -> np.ndarray:
  return np.asarray(special.expit(outputs))


def _same(outputs: np.ndarray) -> np.ndarray:
  return outputs


LIKELIEST_CLASSES = AnswerForm(_softmax, True, 'classes', 'class', 'probability', '.1%')
LABELS = AnswerForm(_sigmoid, False, 'labels', 'label', 'probability', '.1%')
VALUES = AnswerForm(_same, False, 'values', 'target', 'value', '.5g')
