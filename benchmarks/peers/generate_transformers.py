"""Worker: `generate` of transformers with a static cache, in batches of S.

A batch takes as long as its longest completion; what others make beyond their
length is dropped. The cache has exactly the positions that the batch needs.
Completions are sampled from the whole distribution, without log-probs.
"""

from collections.abc import Sequence

import numpy as np
import torch
import transformers

from benchmarks import generation_workload as workload_lib
from benchmarks.peers import generate_turns
from benchmarks.peers import transformers_step


def load_model(
  workload: workload_lib.GenerationWorkload,
) -> transformers.LlamaForCausalLM:
  """Returns the model of a workload, float32, ready to generate."""
  model = transformers_step.load_model(workload.shape).eval()
  model.config.use_cache = True
  return model


def sampling(temperature: float) -> dict[str, object]:
  """Returns how tokens are drawn, in the words of `GenerationConfig`."""
  if temperature == 0:
    return {'do_sample': False}
  # No top-k: the default would keep 50 tokens.
  return {'do_sample': True, 'temperature': 1.0, 'top_k': 0, 'top_p': 1.0}


def make(
  workload: workload_lib.GenerationWorkload,
) -> generate_turns.GenerateFn:
  """Returns the engine."""
  model = load_model(workload)

  def generate_batch(
    prompts: np.ndarray, num_new: int, temperature: float
  ) -> np.ndarray:
    inputs = torch.from_numpy(prompts).long()
    outputs = model.generate(
      inputs,
      attention_mask=torch.ones_like(inputs),
      generation_config=transformers.GenerationConfig(
        max_new_tokens=num_new,
        use_cache=True,
        cache_implementation='static',
        # No token ends a completion.
        eos_token_id=None,
        pad_token_id=0,
        **sampling(temperature),
      ),
    )
    return outputs[:, prompts.shape[1] :].numpy()

  @torch.inference_mode()
  def generate(
    prompts: np.ndarray, lengths: Sequence[int], temperature: float
  ) -> list[Sequence[int]]:
    results: list[Sequence[int]] = []
    for i in range(0, len(prompts), workload.slots):
      batch = slice(i, i + workload.slots)
      made = generate_batch(prompts[batch], max(lengths[batch]), temperature)
      results += [row[:n] for row, n in zip(made, lengths[batch], strict=True)]
    return results

  return generate


if __name__ == '__main__':
  generate_turns.serve(make, ('torch', 'transformers'))
