"""Expected times against decoding drawn lengths step by step."""

from absl.testing import parameterized
import numpy as np

from llamarl_jax.models import catalog
from llamarl_jax.theory import cost_model
from llamarl_jax.theory import devices
from llamarl_jax.theory import generation
from llamarl_jax.theory import lengths


def _decoder(slots, given):
  return generation.Decoder(
    catalog.find('llama-3.1-8b'),
    devices.find('h100'),
    cost_model.Efficiency(),
    cost_model.GeneratorLayout(8, 1, slots),
    prompt_tokens=100.0,
    lengths=given,
  )


def _decoded(decoder, drawn, refilled):
  """Returns the seconds of decoding these responses, step by step."""
  waiting = list(drawn)
  slots = decoder.layout.slots
  left = np.array([waiting.pop(0) for _ in range(min(slots, len(waiting)))])
  age = np.zeros_like(left)
  seconds = 0.0
  while left.size or waiting:
    if not left.size:
      left = np.array([waiting.pop(0) for _ in range(min(slots, len(waiting)))])
      age = np.zeros_like(left)
    seconds += decoder.step_seconds(float(left.size), 100.0 + age.mean())
    left, age = left - 1, age + 1
    left, age = left[left > 0], age[left > 0]
    while refilled and waiting and left.size < slots:
      left = np.append(left, waiting.pop(0))
      age = np.append(age, 0)
  return seconds


class GenerationTest(parameterized.TestCase):
  @parameterized.parameters((8, False), (8, True), (32, False), (40, True))
  def test_equal_lengths_are_exact(self, samples, static):
    decoder = _decoder(8, lengths.Lengths(64, 0.0, 64))
    waves = -(-samples // 8)
    step = decoder.step_seconds(8.0, 100.0 + 32.0)
    expected = waves * (64 * step + decoder.prefill_seconds(8))
    found = generation.batch_seconds(decoder, samples, static=static)
    np.testing.assert_allclose(found, expected, rtol=1e-6)

  @parameterized.parameters((16, True), (64, True), (64, False))
  def test_unequal_lengths_in_the_mean(self, samples, static):
    given = lengths.Lengths(64, 0.8, 256)
    decoder = _decoder(16, given)
    rng = np.random.default_rng(0)
    drawn = [
      _decoded(decoder, given.sample(rng, samples).tolist(), not static)
      for _ in range(30 if samples > 16 else 100)
    ]
    waves = samples / 16
    found = generation.batch_seconds(decoder, samples, static=static)
    found -= waves * decoder.prefill_seconds(16)
    # Standard errors are 2.5 % at most. Refilled slots are taken to end
    # as a fresh wave, which is a little long.
    np.testing.assert_allclose(
      found, np.mean(drawn), rtol=0.06 if static else 0.12
    )

  def test_full_slots_pay_the_mean_length(self):
    given = lengths.Lengths(64, 0.8, 256)
    decoder = _decoder(16, given)
    drawn = given.sample(np.random.default_rng(0), 2000).tolist()
    found = 2000 * (
      generation.sample_seconds(decoder) - decoder.prefill_seconds(16) / 16
    )
    np.testing.assert_allclose(
      found, _decoded(decoder, drawn, refilled=True), rtol=0.03
    )

  def test_prompts_of_a_group_are_read_once(self):
    one = _decoder(8, lengths.Lengths(64, 0.0, 64))
    shared = generation.Decoder(
      one.config, one.device, one.efficiency, one.layout, 100.0, one.lengths, 8
    )
    self.assertEqual(shared.prefill_seconds(8), one.prefill_seconds(1))
