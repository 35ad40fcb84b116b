"""Worker: vLLM's engine, its CPU build, each request at its length.

It runs in this process, on all cores. The model is compiled, as is its default,
which needs a C++ compiler.
"""

from collections.abc import Sequence
import json
import os
import pathlib
import tempfile
from typing import Any

import numpy as np
import safetensors.numpy

from benchmarks import generation_workload as workload_lib
from benchmarks import workload as shapes_lib
from benchmarks.peers import generate_turns

# Read when vllm is imported. By itself it would keep one core free, and take
# nearly all memory for its cache.
_ENVIRONMENT = {
  'VLLM_ENABLE_V1_MULTIPROCESSING': '0',
  'VLLM_CPU_OMP_THREADS_BIND': 'nobind',
  'VLLM_CPU_KVCACHE_SPACE': '1',
}


def _save(shape: shapes_lib.Workload, folder: pathlib.Path) -> None:
  """Writes the model as a Hugging Face folder.

  By hand: models of transformers do not load beside the torchvision that comes
  with this build.
  """
  config = {
    'architectures': ['LlamaForCausalLM'],
    'model_type': 'llama',
    'vocab_size': shape.vocab_size,
    'hidden_size': shape.width,
    'intermediate_size': shape.mlp_width,
    'num_hidden_layers': shape.num_layers,
    'num_attention_heads': shape.num_heads,
    'num_key_value_heads': shape.num_kv_heads,
    'head_dim': shape.head_dim,
    'rms_norm_eps': shape.norm_epsilon,
    'rope_parameters': {
      'rope_type': 'default',
      'rope_theta': shape.rope_theta,
    },
    'hidden_act': 'silu',
    'max_position_embeddings': 2048,
    'tie_word_embeddings': True,
    'bos_token_id': None,
    'eos_token_id': None,
  }
  (folder / 'config.json').write_text(json.dumps(config))
  safetensors.numpy.save_file(
    dict(shapes_lib.weights(shape)),
    folder / 'model.safetensors',
    metadata={'format': 'pt'},
  )


def _load(vllm: Any, workload: workload_lib.GenerationWorkload) -> Any:
  """Returns the engine with the workload's weights, by way of a folder."""
  with tempfile.TemporaryDirectory() as temporary:
    folder = pathlib.Path(temporary)
    _save(workload.shape, folder)
    return vllm.LLM(
      model=str(folder),
      skip_tokenizer_init=True,
      dtype='float32',
      max_model_len=workload.prompt + workload.max_new,
      max_num_seqs=workload.slots,
      max_num_batched_tokens=workload.slots * workload.prompt,
      # Prompts differ: there is no prefix to find.
      enable_prefix_caching=False,
      disable_log_stats=True,
      seed=0,
    )


def make(
  workload: workload_lib.GenerationWorkload,
) -> generate_turns.GenerateFn:
  """Returns the engine."""
  os.environ.update(_ENVIRONMENT)
  # Not before: it reads the environment, and prints, where answers may not be.
  import vllm

  llm = _load(vllm, workload)

  def generate(
    prompts: np.ndarray, lengths: Sequence[int], temperature: float
  ) -> list[Sequence[int]]:
    outputs = llm.generate(
      [{'prompt_token_ids': prompt.tolist()} for prompt in prompts],
      [
        vllm.SamplingParams(
          temperature=temperature,
          max_tokens=length,
          ignore_eos=True,
          detokenize=False,
        )
        for length in lengths
      ],
      use_tqdm=False,
    )
    return [output.outputs[0].token_ids for output in outputs]

  return generate


if __name__ == '__main__':
  generate_turns.serve(make, ('vllm-cpu', 'torch', 'transformers'))
