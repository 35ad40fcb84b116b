"""Completions of one engine on 1, 2 and 4 devices that share its layers.

Run as a program, with four simulated devices; prints a list for each number.
"""

import json

import jax
import numpy as np

from llamarl_jax import types
from llamarl_jax.models import config as config_lib
from llamarl_jax.models import llama
from llamarl_jax.sampling import engine as engine_lib
from llamarl_jax.sampling import plan
from llamarl_jax.sharding import mesh as mesh_lib
from llamarl_jax.sharding import rules

NUM_DEVICES = (1, 2, 4)
# Heads that 4 devices divide, and heads that they do not.
MODELS = {'divisible': (4, 4), 'indivisible': (3, 3)}


def _config(num_heads, num_kv_heads):
  return config_lib.LlamaConfig(
    vocab_size=32,
    width=16,
    num_layers=2,
    num_heads=num_heads,
    num_kv_heads=num_kv_heads,
    head_dim=8,
    mlp_width=32,
    rope_theta=1e4,
  )


def _request(index):
  return types.Request(
    admission_index=index,
    stream=types.Stream.TRAIN,
    problem=types.Problem(index, '', ''),
    prompt_tokens=tuple(4 + (index + i * i) % 20 for i in range(1 + 5 * index)),
    num_samples=2,
    temperature=1.0,
    max_new_tokens=8,
  )


def _complete(config, num_devices):
  """Returns [tokens, log-probs] of each completion, in order."""
  mesh = mesh_lib.make_mesh(
    {'tensor': num_devices}, jax.devices()[:num_devices]
  )
  shardings, _ = rules.shardings(
    llama.abstract_params(config), mesh, rules.GENERATOR_RULES
  )
  draw = np.random.default_rng(0)
  params = jax.tree.map(
    lambda spec: draw.normal(
      'norm' in spec.logical_axes, 0.25, spec.shape
    ).astype(np.float32),
    llama.abstract_params(config),
  )
  engine = engine_lib.Engine(
    config,
    plan.EngineSettings(
      num_slots=4,
      segment_length=3,
      max_prompt=20,
      max_new=8,
      prefill_tokens=32,
      least_width=16,
    ),
    key=jax.random.key(1),
    stop_tokens=(3,),
    decode_text=lambda tokens: '',
    mesh=mesh,
  )
  engine.submit([_request(i) for i in range(4)])
  done = {}
  params = jax.device_put(params, shardings)
  while engine.num_running + engine.num_waiting:
    for _, one in engine.segment(params, 0).finished:
      address = one.admission_index, one.sample_index
      done[address] = one.tokens.tolist(), one.log_probs.tolist()
  return [done[address] for address in sorted(done)]


def main():
  """Prints what each number of devices makes, by model."""
  print(
    json.dumps(
      {
        name: {n: _complete(_config(*heads), n) for n in NUM_DEVICES}
        for name, heads in MODELS.items()
      }
    )
  )


if __name__ == '__main__':
  main()
