"""Worker: tunix's sampler, in batches of S.

Its cache has exactly the positions that a batch needs: a sampler for each
length of batches, all compiled before the first turn. That is more than a user
could do who does not know the lengths; with one cache for all it is slower.
Completions are sampled from the whole distribution, without log-probs.
"""

from collections.abc import Sequence
import functools

from flax import nnx
import numpy as np
from tunix.generate import sampler as sampler_lib
from tunix.models.llama3 import model as model_lib

from benchmarks import generation_workload as workload_lib
from benchmarks.peers import generate_turns
from benchmarks.peers import tunix_step


class _Numbers:
  """A tokenizer of prompts that are token ids as text, such as '17 4 250'."""

  def encode(self, text: str) -> list[int]:
    """Returns the ids."""
    return [int(token) for token in text.split()]

  def decode(self, ids: Sequence[int]) -> str:
    """Returns no text: nobody reads it."""
    del ids
    return ''

  def bos_id(self) -> int:
    """Returns 0, by which the sampler puts nothing before a prompt."""
    return 0

  def eos_id(self) -> int:
    """Returns an id that is no token: nothing ends a completion."""
    return -1

  def pad_id(self) -> int:
    """Returns the one id that is in no prompt."""
    return 0


def _text(prompt: np.ndarray) -> str:
  return ' '.join(map(str, prompt))


def make(
  workload: workload_lib.GenerationWorkload,
) -> generate_turns.GenerateFn:
  """Returns the engine."""
  # Axis names are metadata: there is one device.
  nnx.use_eager_sharding(False)
  # 0.1.7 rotates by the default of this function, whatever its config says.
  model_lib.apply_rope = functools.partial(
    model_lib.apply_rope, rope_theta=workload.shape.rope_theta
  )
  model = tunix_step.load_model(workload.shape)

  @functools.cache
  def sampler_for(num_new: int) -> sampler_lib.Sampler:
    return sampler_lib.Sampler(
      model,
      _Numbers(),
      sampler_lib.CacheConfig(
        cache_size=workload.prompt + num_new,
        num_layers=workload.shape.num_layers,
        num_kv_heads=workload.shape.num_kv_heads,
        head_dim=workload.shape.head_dim,
      ),
    )

  def generate(
    prompts: np.ndarray, lengths: Sequence[int], temperature: float
  ) -> list[Sequence[int]]:
    # With top_p 1 it takes its way without sorting the vocabulary.
    drawn = {'temperature': 1.0, 'top_p': 1.0} if temperature else {}
    results: list[Sequence[int]] = []
    for i in range(0, len(prompts), workload.slots):
      batch = slice(i, i + workload.slots)
      num_new = max(lengths[batch])
      output = sampler_for(num_new)(
        [_text(prompt) for prompt in prompts[batch]],
        max_generation_steps=num_new,
        max_prompt_length=workload.prompt,
        seed=i,
        **drawn,
      )
      results += [
        row[:n] for row, n in zip(output.tokens, lengths[batch], strict=True)
      ]
    return results

  return generate


if __name__ == '__main__':
  generate_turns.serve(make, ('google-tunix', 'jax', 'flax'))
